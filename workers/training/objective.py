"""One microbatch's share of a step's loss, and the sums that the step's metrics are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from workers.training.api import LossSpec
from workers.training.losses import importance_weights, kl_divergence, policy_loss, token_weights
from workers.training.rows import Batch


@dataclass(frozen=True)
class Totals:
    """Of the whole step: loss tokens and sequences; and the constant sequence length of `sequence_sum`."""

    loss_tokens: int
    sequences: int
    max_tokens: int


@dataclass
class TokenSums:
    """Sums over loss tokens; what microbatches are added up in."""

    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    ratio: float = 0.0
    kl_reference: float = 0.0

    def add(self, other: TokenSums) -> None:
        self.tokens += other.tokens
        self.loss += other.loss
        self.entropy += other.entropy
        self.clipped += other.clipped
        self.ratio += other.ratio
        self.kl_reference += other.kl_reference


@dataclass(frozen=True)
class TokenInputs:
    """What the loss is made of, [N] each; all but the first two without gradient."""

    logprobs: Tensor
    entropies: Tensor
    advantages: Tensor
    old_policy: Tensor | None
    """The policy's logprobs at the start of the step; None stands for its present ones, as no step has been taken since."""
    reference: Tensor | None
    """Needed when kl_coef > 0."""
    row_weights: Tensor | None = None
    """The weight of each token's row; None stands for 1."""


def microbatch_loss(spec: LossSpec, batch: Batch, inputs: TokenInputs, totals: Totals) -> tuple[Tensor, TokenSums]:
    """This microbatch's share of the step's loss (a scalar with gradient), and its sums.

    loss = sum over tokens of w (tis * policy_loss + kl_coef * kl) - entropy_coef * H / loss_tokens, with w of
    `token_weights` times the row's weight.
    """
    logprobs, rollout = inputs.logprobs, batch.rollout_logprobs.to(inputs.logprobs.dtype)
    current = logprobs.detach()
    old_policy = current if inputs.old_policy is None else inputs.old_policy
    old = rollout if spec.old_logprobs == "rollout" else old_policy
    policy = policy_loss(logprobs, old, inputs.advantages, clip_low=spec.clip_low, clip_high=spec.clip_high)
    per_token = policy.loss
    if spec.tis_cap is not None:
        per_token = per_token * importance_weights(old_policy, rollout, spec.tis_cap)
    kl_reference = None
    if inputs.reference is not None:
        kl_reference = kl_divergence(logprobs, inputs.reference, spec.kl_estimator)
        per_token = per_token + spec.kl_coef * kl_reference
    weights = token_weights(
        spec.aggregation,
        batch.row,
        batch.row_tokens,
        loss_tokens=totals.loss_tokens,
        sequences=totals.sequences,
        max_tokens=totals.max_tokens,
        dtype=logprobs.dtype,
    )
    if inputs.row_weights is not None:
        weights = weights * inputs.row_weights
    loss = (weights * per_token).sum()
    if spec.entropy_coef:
        loss = loss - spec.entropy_coef * inputs.entropies.sum() / totals.loss_tokens
    with torch.no_grad():
        sums = [
            loss,
            inputs.entropies.sum(),
            policy.clipped.sum(),
            policy.ratio.sum(),
            loss.new_zeros(()) if kl_reference is None else kl_reference.sum(),
        ]
        return loss, TokenSums(batch.tokens, *cast("list[float]", torch.stack([x.double() for x in sums]).tolist()))
