"""Numbers and places that follow from a configuration; checks, plan and controller take them from here."""

from __future__ import annotations

import tempfile
from pathlib import Path

from controller.config.model_dir import ModelFacts
from controller.config.schema import Config, ModelConfig, RolloutConfig
from controller.samplers import InOrder, Sampler, Windowed


def sampler_of(rollout: RolloutConfig) -> Sampler:
    if rollout.sampler == "in_order":
        return InOrder(rollout.groups_per_step, rollout.max_staleness)
    return Windowed(rollout.groups_per_step, rollout.max_staleness, rollout.over_sampling)


def generating_groups(rollout: RolloutConfig) -> int:
    """Most groups that generate at the same time."""
    live = sampler_of(rollout).required_capacity()
    return live if rollout.max_in_flight_groups is None else min(rollout.max_in_flight_groups, live)


def context_tokens(config: Config, model: ModelFacts | None) -> int | None:
    """Longest conversation, and so the longest row, in tokens; None when neither config nor model says."""
    limits = (config.generation.max_model_len, model.context if model else None)
    return min((limit for limit in limits if limit is not None), default=None)


def weight_bytes(config: ModelConfig, model: ModelFacts) -> int:
    """Size of one published version of the weights."""
    return model.parameters * (2 if config.dtype == "bfloat16" else 4)


def weights_folder(config: Config) -> Path:
    """Where weights pass from trainer to engines."""
    if config.weight_sync.dir is not None:
        return Path(config.weight_sync.dir)
    shared_memory = Path("/dev/shm")  # noqa: S108  # the worker makes its own folder in it
    return shared_memory if shared_memory.is_dir() else Path(tempfile.gettempdir())
