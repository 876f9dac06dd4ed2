"""What each worker process is told at start, from the configuration."""

from __future__ import annotations

from pathlib import Path

from controller.config.schema import Config, GenerationConfig
from dataplane.spec import PlaneSpec
from workers.generation.api import EngineSpec, GenerationSpec
from workers.generation.vllm_args import gpus_per_engine
from workers.training.api import TrainingSpec
from workers.weight_sync.spec import WeightSyncSpec


def generation_spec(config: Config, plane: PlaneSpec, index: int) -> GenerationSpec:
    generation, transport = config.generation, config.weight_sync.transport
    return GenerationSpec(
        name=f"generation-{index}",
        model_path=str(Path(config.model.path).absolute()),
        engine=EngineSpec(
            kind=generation.engine,
            max_batch=generation.max_batch,
            max_model_len=generation.max_model_len,
            dtype=config.model.dtype,
            device=generation.device,
            threads=generation.threads,
            vllm=generation.vllm,
            gpus=_gpus(generation, index),
            weight_transfer=transport if transport in ("nccl", "ipc") else None,
        ),
        plane=plane,
        weight_sync=weight_sync_spec(config),
        seed=config.run.seed * 1000 + index,
    )


def _gpus(generation: GenerationConfig, index: int) -> tuple[int, ...]:
    """The GPUs of one of several vLLM workers: they follow one another, beginning with that of `generation.device`."""
    kind, _, first = generation.device.partition(":")
    if generation.engine != "vllm" or kind != "cuda":
        return ()
    count = gpus_per_engine(generation.vllm)
    start = int(first or 0) + index * count
    return tuple(range(start, start + count))


def weight_sync_spec(config: Config, folder: Path | None = None) -> WeightSyncSpec:
    sync = config.weight_sync
    return WeightSyncSpec(
        transport=sync.transport,
        mode=sync.mode,
        drain_timeout_s=sync.drain_timeout_s,
        host=sync.host,
        engines=config.generation.workers,
        timeout_s=sync.timeout_s,
        folder="" if folder is None else str(folder),
        args=sync.args,
    )


def training_spec(config: Config, plane: PlaneSpec, weights_dir: Path) -> TrainingSpec:
    training = config.training
    return TrainingSpec(
        name="training",
        model_path=str(Path(config.model.path).absolute()),
        plane=plane,
        optimizer=training.optimizer,
        loss=training.loss,
        temperature=config.rollout.temperature,
        max_completion_tokens=config.rollout.max_tokens,
        weight_sync=weight_sync_spec(config, weights_dir),
        dtype=config.model.dtype,
        device=training.device,
        threads=training.threads,
        seed=config.run.seed,
    )
