"""The configuration of a run, as typed structs: every key, its default, its range, its unit. Unknown keys are errors.

The constructors do not check ranges; `controller.config.load` and `controller.config.checks` do.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from dataplane.ray_settings import RaySettings
from dataplane.topology import MooncakeSettings
from workers.training.api import LossSpec, OptimizerSpec

PositiveInt = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=1, le=65536)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Seconds = Annotated[float, Meta(gt=0, le=1e7, description="seconds, a number > 0 and <= 1e7")]
Milliseconds = Annotated[float, Meta(ge=1, le=1e7, description="milliseconds, a number >= 1 and <= 1e7")]
Folder = Annotated[str, Meta(min_length=1, description="a path")]
Transport = Annotated[
    str,
    Meta(pattern=r"^(file|gloo|nccl|ipc|[^:]+:[^:]+)$", description="file, gloo, nccl, ipc or module:Class"),
]
SamplerName = Annotated[
    str,
    Meta(
        pattern=r"^(windowed|ready_first|weight_fifo|in_order|[^:]+:[^:]+)$",
        description="windowed, ready_first, weight_fifo, in_order or module:Class",
        examples=["windowed", "ready_first", "weight_fifo", "in_order"],
    ),
]
Device = Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$", description="cpu, cuda or cuda:N")]


class RunConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    dir: Folder
    """The run's folder: metrics, trace, report, checkpoints. An older run there is continued or moved aside (`--resume`)."""
    steps: PositiveInt
    """Optimizer steps to train."""
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    """Seeds the prompts, the samplers and the model's randomness."""


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: Folder
    """A Hugging Face model directory with tokenizer and chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What generation and training compute in."""


class EnvironmentConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, description="a built-in name or module:Class")]
    """A built-in name (`reverse_text`, `reasoning_gym`, `agent_process`) or `module:Class` of your own."""
    args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the environment's constructor."""


class RolloutConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    groups_per_step: Count = 16
    """Prompt groups per optimizer step."""
    group_size: Count = 8
    """Rollouts per prompt."""
    max_staleness: NonNegativeInt = 1
    """How many optimizer steps the weights that began a rollout may lag behind those it trains. 0 is on-policy."""
    sampler: SamplerName = "windowed"
    """Which groups train together. `windowed`: the oldest ready ones within the staleness window. `ready_first`: those that
    were ready first. `weight_fifo`: none before those of older weights. `in_order`: each at exactly the step it was
    dispatched for. Or `module:Class` of your own; docs/samplers.md."""
    sampler_args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of your own sampler's constructor, beside groups_per_step and max_staleness."""
    staleness_from: Literal["dispatch", "oldest_token"] = "dispatch"
    """`windowed` only: what the staleness of a ready group counts from. `dispatch`: the weights served then.
    `oldest_token`: those that its oldest loss token was sampled with, which are newer where it waited for an engine."""
    freshest_first: bool = False
    """`windowed` with over_sampling only: of the ready groups those of the newest weights train first."""
    min_step_batch_fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """A dropped group is replaced by another while a step has at most this share of groups_per_step; above it the step
    trains without. 1 always replaces."""
    over_sampling: Annotated[float, Meta(ge=1, le=100)] = 1.0
    """`windowed` only: capacity as a multiple of groups_per_step * (max_staleness + 1), so that a slow group does not
    hold up a step. Surplus groups that grow too stale are evicted."""
    max_in_flight_groups: PositiveInt | None = None
    """Groups generating at the same time; null leaves it to the sampler's capacity."""
    max_tokens: PositiveInt = 256
    """Completion tokens per model call."""
    temperature: NonNegative = 1.0
    """Sampling temperature; the trainer's logits are divided by it too."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: NonNegativeInt = 0
    """Sample among the k most probable tokens; 0 is off."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Extra stop tokens; the model's own end-of-turn tokens always stop."""
    max_calls: PositiveInt = 64
    """Model calls per rollout."""
    timeout_s: Seconds = 600.0
    """Deadline of one rollout, from dispatch to reward."""
    turn_timeout_s: Seconds = 300.0
    """Deadline of what an environment does between two model calls, and before the first and after the last."""
    call_timeout_s: Seconds = 300.0
    """Deadline of one model call."""


class GenerationConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    engine: Literal["torch", "vllm"] = "torch"
    """What generates. `torch`: continuous batching on a Hugging Face model. `vllm`: vLLM, which is installed separately."""
    vllm: dict[str, Any] = field(default_factory=dict[str, Any])
    """vLLM's engine arguments by name, e.g. `tensor_parallel_size: 2`; all but those that other keys say."""
    workers: PositiveInt = 1
    """Generation worker processes, each with its own copy of the model."""
    max_batch: PositiveInt = 128
    """Requests that decode together in one worker."""
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    """Tokens per conversation, prompt and completion; null takes the model's own limit."""
    device: Device = "cpu"
    """Where the engines run. vLLM's on GPUs: each worker takes as many as its engine needs, beginning with cuda:N."""
    threads: PositiveInt = 1
    """CPU threads of each worker."""


class TrainingConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    loss: LossSpec = field(default_factory=LossSpec)
    max_tokens_per_microbatch: PositiveInt = 8192
    """Padded tokens of one forward/backward pass. A longer row gets a pass of its own."""
    device: Device = "cpu"
    """Where the trainer runs."""
    threads: PositiveInt = 1
    """CPU threads of the trainer."""
    step_timeout_s: Seconds = 600.0
    """Deadline of each of the trainer's calls."""


class AdvantageConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    estimator: Literal["grpo", "dr_grpo", "rloo", "opo", "reinforce++", "reinforce++_baseline"] = "grpo"
    """How rewards become advantages. `grpo`: less the group's mean, over its deviation. `dr_grpo`: less the mean.
    `rloo`: less the mean of the others. `opo`: less the mean weighted by length. `reinforce++`: less the step's mean, over
    its deviation; `reinforce++_baseline`: less the group's mean, over the step's deviation."""
    rewards: Literal["environment", "random"] = "environment"
    """`random` is the control of an experiment: advantages come from coin flips, one per rollout, which teach nothing. What
    is reported and evaluated stays the environment's reward."""


class AgreementConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every step measures how far the trainer's logprobs of its tokens are from the engines'; this is when it is too far."""

    max_difference: Positive | None = 0.5
    """Alarm above this mean of |log p(trainer) - log p(engine)| over a step's tokens, in nats; null never alarms. It holds
    how far the policy moved within the staleness."""
    max_fresh_difference: Positive | None = 0.1
    """Likewise over the tokens that were sampled with the trainer's own weights, where only numerics differ: some 1e-7 in
    float32, 0.02 to 0.05 in bfloat16."""
    abort_after: PositiveInt | None = None
    """Alarms in as many steps, one after another, that end the run; null only warns."""


class EvaluationConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rollouts on held-out prompts before the first step, after the last, and between; docs/evaluation.md."""

    questions: Count | None = None
    """Held-out prompts, the same ones in every evaluation; null is no evaluation. The environment has to offer so many."""
    samples: Count = 1
    """Rollouts per question."""
    every_steps: PositiveInt | None = None
    """Steps between evaluations; null leaves the one before the first step and the one after the last."""
    temperature: NonNegative | None = None
    """Sampling temperature of these rollouts, 0 for greedy; null takes rollout.temperature."""
    seed: NonNegativeInt = 0
    """Which of the environment's held-out prompts are asked."""


class DataPlaneConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where token rows live: TransferQueue's servers; docs/dataplane.md."""

    backend: Literal["simple", "mooncake"] = "simple"
    """What keeps the rows. `simple`: TransferQueue's own storage processes. `mooncake`: MooncakeStore, installed apart."""
    servers: Literal["local", "ray"] = "local"
    """Where they run: as processes of this machine, or in a Ray cluster."""
    storage_units: PositiveInt = 1
    """Storage processes."""
    timeout_s: Seconds = 30.0
    """Deadline of each put, get and clear."""
    mooncake: MooncakeSettings = field(default_factory=MooncakeSettings)
    ray: RaySettings = field(default_factory=RaySettings)


class WeightSyncConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How each step's weights get from the trainer into the engines; docs/weight_sync.md."""

    transport: Transport = "file"
    """`file`: a file in shared memory. `gloo`: a broadcast over the network. `nccl`, `ipc`: vLLM's own, between GPUs or on
    one. Or `module:Class` of your own."""
    args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of your own transport's constructor."""
    mode: Literal["keep", "drain", "abort"] = "keep"
    """What becomes of the calls that are running in an engine. `keep`: they go on with the new weights. `drain`: they end
    first, and new ones wait. `abort`: they are taken out, and go on from the tokens that they have."""
    drain_timeout_s: Seconds = 60.0
    """`drain` only: calls that have not ended by then go on with the new weights."""
    dir: Folder | None = None
    """Where `file` and `gloo` keep the weights; null takes shared memory (/dev/shm), or the temp folder without it."""
    host: Annotated[str, Meta(min_length=1, description="a host name or address")] = "127.0.0.1"
    """`gloo`, `nccl` and `ipc`: the address of this machine at which the engines reach the trainer."""
    timeout_s: Seconds = 120.0
    """Deadline of publishing a version, and of each engine's loading it."""


class TokenCaptureConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What of a rollout is trained, and on what proof; rules and reason codes in docs/custody.md."""

    enabled: bool = True
    """Capture every model call's exact tokens beside the engine, and train only what a receipt proves. With false the
    environment returns the tokens of each rollout itself; they are checked for shape and range, and marked as unproven."""
    trajectory: Literal["terminal", "branches"] = "terminal"
    """`terminal` trains the conversation up to the terminal call: one row per rollout. `branches` trains every proven
    conversation of a rollout (sub-agents, history before a compaction) as a row with the rollout's reward; tokens that
    rows share are trained in one of them."""
    credit: Literal["equal", "per_token", "per_branch"] = "equal"
    """`branches` only: what a row weighs in the loss. `equal`: a rollout counts once, its rows share evenly. `per_token`: a
    rollout counts as one sequence made of all its rows' tokens. `per_branch`: each row counts as a rollout of its own."""
    on_failure: Literal["placeholder", "drop_group", "abort"] = "placeholder"
    """What a rollout costs whose custody fails. `placeholder`: itself; its reward enters no baseline. `drop_group`: its
    group. `abort`: the run. Rollouts that made no call, timed out or ended in a failed call are always placeholders."""


class FinalizerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    concurrency: PositiveInt = 4
    """Groups being verified at the same time."""
    max_dropped_in_a_row: PositiveInt = 64
    """Groups dropped one after another, none trained between them, that end the run: it would only use up prompts."""


class LedgerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The record of every rollout, in `<run.dir>/ledger`; how it is kept and read is in docs/ledger.md."""

    durability: Literal["batch", "none"] = "batch"
    """`batch`: a call is answered when its record is on the disk; calls that end together share a write. `none`: the
    record is written without waiting, and a crash can lose its end."""
    segment_mb: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Size of the files it is written in, in MiB."""
    history_mb: NonNegativeInt = 1024
    """At a checkpoint, what the record has beyond this, in MiB, is compacted: of rollouts that ended, the oldest first, only
    their numbers are kept."""


class CheckpointConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    every_steps: PositiveInt | None = None
    """Steps between checkpoints; null writes one only at the end and on an interrupt."""
    keep: PositiveInt = 2
    """Checkpoints to keep; older ones are removed."""


class WatchdogConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    stall_after_s: Seconds = 900.0
    """No group committed and no step done for this long, while work remains, is a stall."""
    stall_action: Literal["warn", "abort"] = "abort"
    """A stall reports what waits for what; `abort` then ends the run."""


class LoopConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long one thing may keep the event loop; a thread outside of it names what did. More in docs/running.md."""

    report_over_ms: Milliseconds = 100.0
    """Longer is reported with its stack, and counted by culprit."""
    fail_over_ms: Milliseconds | None = None
    """Longer ends the run with the culprit's name: for tests. null is off."""
    exit_after_s: Seconds | None = 60.0
    """So long is hopeless: all stacks are written to `stacks.txt` in the run's folder and the process ends with exit code 4.
    null is off."""


class GateConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The gate over HTTP: an OpenAI API for agents that are programs of their own. What it takes is in docs/gate.md."""

    host: Annotated[str, Meta(min_length=1, description="a host name or address")] = "127.0.0.1"
    """Where it listens. Agents on other machines need an address of this machine's network, or 0.0.0.0 and `public_url`."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """0 takes a free one."""
    public_url: Annotated[str, Meta(pattern=r"^https?://[!-.0-~]+/?$", description="http(s)://host:port")] | None = None
    """What agents are told instead of `host` and `port`: the way in from outside, through a proxy perhaps."""
    sampling: Literal["fixed", "request"] = "fixed"
    """`fixed`: calls are sampled with the run's temperature, top_p and top_k; a request with others is refused. `request`: a
    request's own apply, for which training does not correct."""
    max_body_bytes: Annotated[int, Meta(ge=1024, le=3 * 2**20)] = 2 * 2**20
    """Size of a request: the whole conversation so far."""
    max_open_rollouts: PositiveInt = 4096
    """Rollouts with calls running over HTTP at the same time; calls of others get 429."""
    max_connections: PositiveInt = 4096
    """For more, idle ones are closed, or they themselves."""
    keep_alive_s: Seconds = 10.0
    """Between the comments that keep a streamed call's connection alive until its answer is on record."""
    read_timeout_s: Seconds = 30.0
    """For a request's body, once its headers are there."""
    send_timeout_s: Seconds = 60.0
    """A client that takes nothing of its answer for so long is cut off."""
    idle_timeout_s: Seconds = 120.0
    """For a connection's next request, headers included."""


class WorkersConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    start_timeout_s: Seconds = 180.0
    """From starting a worker process to its readiness (imports and model load included)."""
    stop_timeout_s: Seconds = 10.0
    """From asking a worker to stop to killing it."""


class FleetConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How generation workers are watched, restarted and filled with calls; what the states mean is in docs/fleet.md."""

    probe_every_s: Seconds = 2.0
    """Between two questions to a worker; a call that fails asks at once."""
    probe_timeout_s: Seconds = 5.0
    """For the answer."""
    missed_probes: PositiveInt = 2
    """Probes in a row without an answer that quarantine a worker."""
    failed_calls: PositiveInt = 8
    """Calls in a row that fail on one worker, its probes answered, that quarantine it."""
    stalled_after_s: Seconds = 60.0
    """No token for so long, while requests are in the engine, quarantines a worker, and it is restarted at once."""
    restart_after_s: Seconds = 60.0
    """A worker that is quarantined for so long is restarted; until then it may come back by itself."""
    max_restarts: NonNegativeInt = 3
    """Restarts of one worker within `restart_window_s`; one more, and it is retired."""
    restart_window_s: Seconds = 3600.0
    """Restarts before that are forgotten."""
    min_serving: Count = 1
    """With fewer workers that are not retired the run ends."""
    max_calls: Count = 4096
    """Model calls at one worker at the same time; more wait in the controller."""
    adapt_calls: bool = True
    """Lower that number when an engine preempts requests, fills its KV cache or queues more than it runs, and raise it again
    bit by bit (AIMD)."""


class FailuresConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is tried again when machinery fails, and how often; the classes of failures are in docs/fleet.md."""

    call_attempts: Annotated[int, Meta(ge=1, le=64)] = 4
    """Attempts of one model call within its deadline, each on another worker where there is one. Waiting for a worker to
    come back is no attempt."""
    backoff_s: Seconds = 0.2
    """Pause before the second attempt; each next one is twice as long."""
    max_backoff_s: Seconds = 10.0
    """The longest pause."""
    rollout_attempts: PositiveInt = 3
    """Times that a rollout is played whose calls were lost in spite of that; after the last one it is a placeholder."""
    max_lost_in_a_row: PositiveInt = 1024
    """Rollouts lost one after another, none played to its end between them, that end the run."""
    max_lost: NonNegativeInt = 10000
    """Rollouts of one run that are played again; later ones are placeholders at once."""
    max_failed_per_prompt: NonNegativeInt = 1
    """Rollouts of a prompt at which the environment may fail: placeholders, never played again. With more the group is
    dropped."""
    max_failed: NonNegativeInt = 100
    """Rollouts of one run at which it may fail; one more ends the run. So does the first one, before any was played to its
    end."""
    capture_alarm_rate: Annotated[float, Meta(gt=0, le=1)] | None = 0.05
    """Warn when custody fails for a larger share of the last `capture_alarm_rollouts`; null never warns."""
    capture_alarm_rollouts: PositiveInt = 256
    """Over how many rollouts that share is taken."""


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    run: RunConfig
    model: ModelConfig
    environment: EnvironmentConfig
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    agreement: AgreementConfig = field(default_factory=AgreementConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    dataplane: DataPlaneConfig = field(default_factory=DataPlaneConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    token_capture: TokenCaptureConfig = field(default_factory=TokenCaptureConfig)
    finalizer: FinalizerConfig = field(default_factory=FinalizerConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    failures: FailuresConfig = field(default_factory=FailuresConfig)
