"""Numbers and places that follow from a configuration; checks, plan and controller take them from here."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from controller.config.model_dir import ModelFacts
from controller.config.schema import Config, ModelConfig, RolloutConfig
from controller.in_order import InOrder
from controller.samplers import ReadyFirst, Sampler, WeightFifo, Windowed


def built_in_sampler(rollout: RolloutConfig) -> Sampler | None:
    """None where it is one of the user's own. Raises ValueError for settings that contradict each other."""
    size = (rollout.groups_per_step, rollout.max_staleness)
    floor = min_groups(rollout)
    match rollout.sampler:
        case "windowed":
            age, freshest_first = rollout.staleness_from, rollout.freshest_first
            return Windowed(*size, rollout.over_sampling, age=age, freshest_first=freshest_first, min_groups=floor)
        case "ready_first":
            return ReadyFirst(*size, min_groups=floor)
        case "weight_fifo":
            return WeightFifo(*size, min_groups=floor)
        case "in_order":
            return InOrder(*size, min_groups=floor)
        case _:
            return None


def min_groups(rollout: RolloutConfig) -> int:
    """The fewest groups that a step trains with when groups were dropped."""
    return math.ceil(rollout.groups_per_step * rollout.min_step_batch_fraction)


def live_groups(rollout: RolloutConfig) -> int:
    """Groups that are live at the same time; for a sampler of the user's own what the built-in ones need."""
    window = rollout.groups_per_step * (rollout.max_staleness + 1)
    return math.ceil(window * rollout.over_sampling) if rollout.sampler == "windowed" else window


def generating_groups(rollout: RolloutConfig) -> int:
    """Most groups that generate at the same time."""
    live = live_groups(rollout)
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
