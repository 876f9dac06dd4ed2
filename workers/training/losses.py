"""The terms of the policy-gradient objective, as pure functions of per-token tensors.

All tensors are 1-D over the loss tokens of a microbatch, shape [N], unless said otherwise. Nothing here averages: a step's
loss is a weighted sum over its tokens, and `token_weights` holds every normaliser. So the losses of a step's microbatches
add up to the loss of the whole step, however it was split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
KlEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20: e^20 is far outside any clip range, and an infinite ratio would make 0 * inf = NaN."""


def token_weights(
    aggregation: Aggregation,
    row: Tensor,
    row_tokens: Tensor,
    *,
    loss_tokens: int,
    sequences: int,
    max_tokens: int,
    dtype: torch.dtype,
) -> Tensor:
    """The factor of each token's loss in the step's loss, [N].

    `row` int64 [N]: the token's row in the microbatch. `row_tokens` int64 [rows]: loss tokens of each row. `loss_tokens`
    and `sequences` are totals of the whole step.
    token_mean: 1 / loss_tokens (DAPO, Yu et al. 2025). sequence_mean: 1 / (sequences * tokens of its row) (GRPO, Shao et
    al. 2024). sequence_sum: 1 / (sequences * max_tokens) (Dr. GRPO, Liu et al. 2025).
    """
    if aggregation == "sequence_mean":
        return 1.0 / (sequences * row_tokens[row]).to(dtype)
    constant = 1.0 / loss_tokens if aggregation == "token_mean" else 1.0 / (sequences * max_tokens)
    return torch.full(row.shape, constant, dtype=dtype, device=row.device)


@dataclass(frozen=True)
class PolicyLoss:
    loss: Tensor
    """[N], differentiable."""
    ratio: Tensor
    """pi / pi_old, [N], detached."""
    clipped: Tensor
    """bool [N]: where clipping took the token's gradient away."""


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi / pi_old.

    PPO, Schulman et al. 2017, eq. 7; separate bounds: clip-higher, DAPO, Yu et al. 2025, eq. 10.
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    ratio = ratio.detach()
    above, below = ratio > 1.0 + clip_high, ratio < 1.0 - clip_low
    return PolicyLoss(loss, ratio, torch.where(advantages > 0, above, below & (advantages < 0)))


def importance_weights(policy_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """min(pi_trainer / pi_sampler, cap), detached: truncated importance sampling (TIS) between the two numerics.

    Ionides 2008; for sampler-trainer mismatch: Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training".
    """
    log_ratio = (policy_logprobs - rollout_logprobs).detach()
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)


def kl_divergence(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the policy's samples, differentiable in `logprobs`.

    Schulman 2020, "Approximating KL divergence", with d = log reference - log policy:
    k1 = -d; k2 = d^2 / 2; k3 = e^d - 1 - d.
    As a loss term they differ in gradient: k2's is the reverse KL's, k3's is that of the forward KL, and k1's is zero in
    expectation (Tang & Munos 2025), so k1 only adds noise.
    """
    d = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    return torch.expm1(d) - d
