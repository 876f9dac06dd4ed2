"""The configuration of a run, as typed structs: every key, its default, its unit. Unknown keys are errors."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field


class RunConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    dir: str
    """The run's folder: metrics, trace, report, checkpoints. Created; a finished run in it is an error unless resumed."""
    steps: int
    """Optimizer steps to train."""
    seed: int = 0


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: str
    """A Hugging Face model directory with tokenizer and chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"


class EnvironmentConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    """A built-in name (`reverse_text`, `reasoning_gym`) or `module:Class` of your own."""
    args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the environment's constructor."""


class RolloutConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    groups_per_step: int = 16
    """Prompt groups per optimizer step."""
    group_size: int = 8
    """Rollouts per prompt."""
    max_staleness: int = 1
    """How many optimizer steps the weights that began a rollout may lag behind those it trains. 0 is on-policy."""
    sampler: Literal["windowed", "in_order"] = "windowed"
    over_sampling: float = 1.0
    """`windowed` only: capacity as a multiple of groups_per_step * (max_staleness + 1), so that a slow group does not
    hold up a step. Surplus groups that grow too stale are evicted."""
    max_in_flight_groups: int | None = None
    """Groups generating at the same time; None leaves it to the sampler's capacity."""
    max_tokens: int = 256
    """Completion tokens per model call."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    max_calls: int = 64
    """Model calls per rollout."""
    timeout_s: float = 600.0
    """Deadline of one rollout, from dispatch to reward."""
    call_timeout_s: float = 300.0
    """Deadline of one model call."""


class GenerationConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    engine: Literal["torch"] = "torch"
    workers: int = 1
    max_batch: int = 128
    """Requests that decode together in one worker."""
    max_model_len: int | None = None
    """Tokens per conversation, prompt and completion; None takes the model's own limit."""
    device: str = "cpu"
    threads: int = 1


class OptimizerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """AdamW, linear warm-up to a constant rate, global-norm clipping."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0


class LossConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """See `workers.training.api.LossSpec` for what each term is."""

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.28
    old_logprobs: Literal["rollout", "policy"] = "rollout"
    tis_cap: float | None = None
    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0


class TrainingConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    max_tokens_per_microbatch: int = 8192
    """Padded tokens of one forward/backward pass."""
    device: str = "cpu"
    threads: int = 1
    step_timeout_s: float = 600.0
    """Deadline of each of the trainer's calls."""


class AdvantageConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    estimator: Literal["grpo", "dr_grpo", "rloo"] = "grpo"


class DataPlaneConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    storage_units: int = 1
    timeout_s: float = 30.0
    """Deadline of each put, get and clear."""


class WeightSyncConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    dir: str | None = None
    """Where weights pass from trainer to engines; None takes shared memory (/dev/shm), or the temp folder without it."""
    timeout_s: float = 120.0


class FinalizerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    concurrency: int = 4
    """Groups being verified at the same time."""


class CheckpointConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    every_steps: int | None = None
    """None writes one only at the end and on an interrupt."""
    keep: int = 2


class WatchdogConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    stall_after_s: float = 300.0
    """No group committed and no step done for this long, while work remains, is a stall."""
    stall_action: Literal["warn", "abort"] = "abort"


class WorkersConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    start_timeout_s: float = 180.0
    """From starting a worker process to its readiness (imports and model load included)."""
    stop_timeout_s: float = 10.0
    """From asking a worker to stop to killing it."""


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    run: RunConfig
    model: ModelConfig
    environment: EnvironmentConfig
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    dataplane: DataPlaneConfig = field(default_factory=DataPlaneConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    finalizer: FinalizerConfig = field(default_factory=FinalizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
