"""The generation worker's RPC methods and its start-up spec."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from dataplane.spec import PlaneSpec
from ledger.records import CallReply, CallRequest
from workers.generation.engine import EngineStats
from workers.rpc.method import Empty, Method
from workers.weight_sync.spec import WeightSyncSpec


class EngineSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of an engine. The KV cache of torch's grows to the largest batch times the longest request it has seen."""

    kind: Literal["torch", "vllm"] = "torch"
    max_batch: int = 128
    """Requests that decode together."""
    max_model_len: int | None = None
    """Tokens per request, prompt and completion; None takes the model's own limit."""
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    """Torch intra-op threads."""
    vllm: dict[str, Any] = field(default_factory=dict[str, Any])
    """vLLM's engine arguments, beyond what the other settings say."""
    gpus: tuple[int, ...] = ()
    """The GPUs of this worker's vLLM engine, of those that the process sees; none leaves it to vLLM."""
    weight_transfer: Literal["nccl", "ipc"] | None = None
    """vLLM's own backend by which weights reach its workers; None when they come as files."""


class GenerationSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a generation worker process is told at start."""

    name: str
    model_path: str
    engine: EngineSpec
    plane: PlaneSpec
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    seed: int = 0


class LoadWeights(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    address: str
    """Where the trainer said that the version is to be had."""
    version: int


class WeightsLoaded(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    version: int
    """The version now served."""
    seconds: float


class WorkerInfo(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a generation worker is, asked once at start."""

    max_model_len: int
    vocab_size: int
    weight_version: int
    engine: str


class Abort(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    call_id: str


GENERATE = Method("generate", CallRequest, CallReply, timeout_s=600.0)
"""Render, generate, stage, parse. Failure kinds: prompt_too_long, bad_request (data); prefix_lost, prefix_mismatch,
render_mismatch, bad_logprobs, bad_routes (capture); prefix_unavailable, staging_failed, engine_dead, engine_restarting
(infra)."""
ABORT = Method("abort", Abort, Empty, timeout_s=10.0)
LOAD_WEIGHTS = Method("load_weights", LoadWeights, WeightsLoaded, timeout_s=300.0)
"""Failure kinds (all infra): bad_weights or weights_unavailable (retryable), in which case the old version is still served;
engine_dead, engine_restarting."""
INFO = Method("info", Empty, WorkerInfo, timeout_s=30.0)
STATS = Method("stats", Empty, EngineStats, timeout_s=10.0)
