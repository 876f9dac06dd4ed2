"""What a weight transport asks of engine, devices and number of workers, and which keys have no effect with it."""

from __future__ import annotations

from collections.abc import Iterator

from controller.config.problems import Problem
from controller.config.schema import Config, WeightSyncConfig
from controller.config.surroundings import own_class
from workers.generation.vllm_args import gpus_per_engine
from workers.weight_sync.spec import BUILT_IN, NATIVE


def weight_sync(config: Config) -> Iterator[Problem]:
    """A transport of one's own is looked for, not imported; no GPU is asked."""
    sync = config.weight_sync
    if sync.transport in NATIVE:
        yield from _native(config)
    elif sync.transport not in BUILT_IN:
        yield from own_class("weight_sync.transport", sync.transport, f"{', '.join(BUILT_IN)}, or module:Class")
    yield from _unused(sync)
    if sync.mode == "drain" and sync.drain_timeout_s >= sync.timeout_s:
        yield Problem(
            path="weight_sync.drain_timeout_s",
            what=f"{sync.drain_timeout_s:g} >= {sync.timeout_s:g}: an engine that waits so long is late itself",
            allowed="< weight_sync.timeout_s, with time left to load the weights",
            remedy="lower it, or raise weight_sync.timeout_s",
        )


def _native(config: Config) -> Iterator[Problem]:
    generation, training, transport = config.generation, config.training, config.weight_sync.transport
    what = f"{transport} is vLLM's transfer between GPUs"
    if generation.engine != "vllm":
        yield Problem(
            path="weight_sync.transport",
            what=f"{what}, with generation.engine {generation.engine}",
            allowed="file, gloo or module:Class for this engine",
            remedy="set generation.engine: vllm, or weight_sync.transport: file",
        )
    for key, device in (("generation.device", generation.device), ("training.device", training.device)):
        if device == "cpu":
            yield Problem(
                path="weight_sync.transport",
                what=f"{what}, with {key} cpu",
                allowed="file, gloo or module:Class where one side computes on a CPU",
                remedy=f"set {key}: cuda:N, or weight_sync.transport: file",
            )
    if "cpu" in (generation.device, training.device):
        return
    first, trainer = _gpu(generation.device), _gpu(training.device)
    count = generation.workers * gpus_per_engine(generation.vllm)
    if transport == "ipc" and (count > 1 or first != trainer):
        yield Problem(
            path="weight_sync.transport",
            what=f"ipc with the engines on {_gpus(first, count)} and the trainer on cuda:{trainer}",
            allowed="one engine of one GPU, which is the trainer's: IPC opens another process's memory on the same GPU",
            remedy="set weight_sync.transport: nccl",
        )
    if transport == "nccl" and first <= trainer < first + count:
        yield Problem(
            path="weight_sync.transport",
            what=f"nccl with the engines on {_gpus(first, count)} and the trainer on cuda:{trainer}",
            allowed="a trainer's GPU that no engine has: NCCL takes one member per GPU",
            remedy=f"set training.device: cuda:{first + count}",
        )


def _unused(sync: WeightSyncConfig) -> Iterator[Problem]:
    default = WeightSyncConfig()
    for key, used, switch in (
        ("args", sync.transport not in BUILT_IN, "a transport of your own"),
        ("dir", sync.transport in ("file", "gloo"), "transport file or gloo"),
        ("host", sync.transport in ("gloo", *NATIVE), "transport gloo, nccl or ipc"),
        ("drain_timeout_s", sync.mode == "drain", "mode drain"),
    ):
        if not used and getattr(sync, key) != getattr(default, key):
            yield Problem(
                path=f"weight_sync.{key}",
                what="has no effect",
                allowed=f"nothing, unless weight_sync has {switch}",
                warning=True,
            )


def _gpu(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _gpus(first: int, count: int) -> str:
    return f"cuda:{first}" if count == 1 else f"cuda:{first} to cuda:{first + count - 1}"
