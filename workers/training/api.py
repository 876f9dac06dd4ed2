"""The training worker's RPC methods (the split step API) and its start-up spec.

One step: `begin_step`, then `train_microbatch` for each microbatch (gradients add up), then `finish_step` (clip, optimizer
step). Rows are read from the data plane by key; the controller sends metadata only.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from dataplane.spec import PlaneSpec
from workers.rpc.method import Empty, Method
from workers.weight_sync.spec import WeightSyncSpec

NonNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]


class OptimizerSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """AdamW (Loshchilov & Hutter 2019), linear warm-up to a constant rate, global-norm clipping."""

    lr: NonNegative = 1e-6
    """Learning rate after the warm-up."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of the two moment estimates."""
    eps: Positive = 1e-8
    """Added to the denominator of the update."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """Steps over which the rate rises linearly to `lr`."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this global norm."""


class LossSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The clipped policy-gradient loss and its terms."""

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """`token_mean`: mean over the step's tokens (DAPO). `sequence_mean`: mean of each sequence's mean (GRPO).
    `sequence_sum`: mean over sequences of sums over a constant length, rollout.max_tokens (Dr. GRPO)."""
    clip_low: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """The importance ratio is clipped below at 1 - clip_low (PPO)."""
    clip_high: Positive = 0.28
    """The importance ratio is clipped above at 1 + clip_high (clip-higher, DAPO)."""
    old_logprobs: Literal["rollout", "policy"] = "rollout"
    """The ratio's denominator. `rollout`: the sampler's logprobs. `policy`: the trainer's at the start of the step, at
    the cost of one more forward pass."""
    tis_cap: Positive | None = None
    """Truncated importance sampling between sampler and trainer: each token is weighted by
    min(exp(policy_old - rollout), tis_cap). Needs old_logprobs: policy."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the starting model; above 0 the trainer keeps a second copy of the model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL (Schulman 2020)."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus: the mean token entropy times this is subtracted from the loss."""


class TrainingSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a training worker process is told at start."""

    name: str
    model_path: str
    plane: PlaneSpec
    optimizer: OptimizerSpec
    loss: LossSpec
    temperature: float
    """The rollouts' sampling temperature: the policy's logits are divided by it before the softmax."""
    max_completion_tokens: int
    """The constant length of `sequence_sum` aggregation."""
    weight_sync: WeightSyncSpec
    """How `publish_weights` does."""
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    seed: int = 0


class BeginStep(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Opens step `step` (0-based). The totals are over the whole step, so that each microbatch can scale its own sum."""

    step: int
    loss_tokens: int
    """Tokens with loss_mask 1 in all rows of the step."""
    sequences: int
    restart: bool = False
    """Abandon the step if it is open or broken: drop the gradients it has added up. Otherwise that is an error."""


class TrainRow(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    key: str
    advantage: float
    length: int
    """Tokens of the row, which the worker checks against what it reads."""
    weight: Annotated[float, Meta(gt=0)] = 1.0
    """Factor of the row's policy and KL loss, after the normaliser: how much of its rollout's credit the row has."""


class Microbatch(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    step: int
    index: int
    partition: str
    rows: tuple[TrainRow, ...]


class MicrobatchDone(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    loss: float
    """This microbatch's share of the step's loss."""
    tokens: int


class RowKeys(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rows whose logprobs the worker computes and keeps (by key) until the step is finished."""

    step: int
    partition: str
    keys: tuple[str, ...]
    model: Literal["policy", "reference"] = "policy"


class FinishStep(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    step: int


RATIO_QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


class Agreement(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How far the trainer's logprobs of loss tokens are from the sampler's; d = log pi_trainer - log pi_sampler, nats."""

    tokens: int
    difference_mean: float
    """Mean of |d|."""
    difference_max: float
    """Largest |d| of one token."""
    kl: float
    """Mean of r - 1 - d with r = e^d: the k3 estimate of KL(sampler || trainer) from the sampler's tokens (Schulman 2020,
    "Approximating KL divergence")."""
    ratio_quantiles: tuple[float, ...]
    """Of the importance ratio r, at `RATIO_QUANTILES`."""


class StepMetrics(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of one optimizer step. Means are over the step's loss tokens. All in nats where they are logprobs."""

    loss: float
    grad_norm: float
    lr: float
    entropy: float
    clip_fraction: float
    ratio_mean: float
    agreement: Agreement
    """Over all loss tokens, before the optimizer moved the weights."""
    agreement_by_age: dict[int, Agreement]
    """Over those whose weights were so many steps older than the trainer's; the greatest age stands for all above it."""
    kl_reference: float | None
    tokens: int
    seconds: float
    """Compute time from begin to finish."""


class Publish(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    version: int


class Published(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A version that engines can be told to load."""

    address: str
    """By which the transport's other half finds it: a path, for one."""
    version: int
    bytes: int
    """Of all tensors."""
    seconds: float


class StatePath(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A folder to save to (must not exist) or load from."""

    path: str


class TrainerInfo(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    parameters: int
    step: int
    """The next step to train."""


INFO = Method("info", Empty, TrainerInfo, timeout_s=30.0)
LOGPROBS = Method("logprobs", RowKeys, Empty, timeout_s=600.0)
"""Optional: what a microbatch needs and is not kept is computed then. Failure kinds: out_of_order (infra), row_gone (data),
bad_row (data), data_plane_timeout (infra, retryable)."""
BEGIN_STEP = Method("begin_step", BeginStep, Empty, timeout_s=60.0)
"""Failure kind: out_of_order (infra)."""
TRAIN_MICROBATCH = Method("train_microbatch", Microbatch, MicrobatchDone, timeout_s=600.0)
"""Failure kinds: those of LOGPROBS, which leave the step open and this microbatch untrained; non_finite (data) or any
other, which break the step. A caller that left cannot know: the microbatch, sent again, may be out_of_order as trained."""
FINISH_STEP = Method("finish_step", FinishStep, StepMetrics, timeout_s=600.0)
"""Refused (out_of_order) unless the microbatches had exactly the tokens and sequences that BEGIN_STEP announced."""
PUBLISH_WEIGHTS = Method("publish_weights", Publish, Published, timeout_s=300.0)
"""The weights of the last finished step. Failure kinds: no_space (infra, retryable), bad_weights (infra): the trainer's
tensors are not those of the model."""
SAVE = Method("save", StatePath, Empty, timeout_s=600.0)
"""Model (a Hugging Face directory that any tool loads), optimizer state (safetensors) and step counter, as of the last
finished step; an open step is left open. Failure kinds: bad_checkpoint (infra; the folder exists), no_space (infra)."""
LOAD = Method("load", StatePath, TrainerInfo, timeout_s=600.0)
"""Drops an open step. Failure kind: bad_checkpoint (infra), which leaves the trainer as it was."""
