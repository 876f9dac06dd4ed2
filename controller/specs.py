"""What each worker process is told at start, from the configuration."""

from __future__ import annotations

from pathlib import Path

import msgspec

from controller.config.schema import Config, GenerationConfig
from dataplane.spec import PlaneSpec
from workers.generation.api import EngineSpec, GenerationSpec
from workers.generation.vllm_args import gpus_per_engine
from workers.training.api import LossSpec, OptimizerSpec, TrainingSpec


def generation_spec(config: Config, plane: PlaneSpec, index: int) -> GenerationSpec:
    generation = config.generation
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
        ),
        plane=plane,
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


def training_spec(config: Config, plane: PlaneSpec, weights_dir: Path) -> TrainingSpec:
    training = config.training
    return TrainingSpec(
        name="training",
        model_path=str(Path(config.model.path).absolute()),
        plane=plane,
        optimizer=msgspec.convert(training.optimizer, OptimizerSpec, from_attributes=True),
        loss=msgspec.convert(training.loss, LossSpec, from_attributes=True),
        temperature=config.rollout.temperature,
        max_completion_tokens=config.rollout.max_tokens,
        weights_dir=str(weights_dir),
        dtype=config.model.dtype,
        device=training.device,
        threads=training.threads,
        seed=config.run.seed,
    )
