"""The sampler of a run, a built-in one or the user's own; mistakes in that one are found before the run starts."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import NoReturn, cast

from controller.buffer import LiveGroups
from controller.config.figures import built_in_sampler
from controller.config.problems import ConfigError, Problem
from controller.config.schema import RolloutConfig
from controller.samplers import BufferView, Sampler

METHODS = ("required_capacity", "admit", "select", "evict", "should_abort_inflight")


def make_sampler(rollout: RolloutConfig) -> Sampler:
    """`module:Class` is also looked for in the current directory, and made with groups_per_step, max_staleness and
    `rollout.sampler_args`. Imports the user's code, so it may block. Raises ConfigError.
    """
    sampler = built_in_sampler(rollout)
    return _own(rollout) if sampler is None else sampler


def _own(rollout: RolloutConfig) -> Sampler:
    name = rollout.sampler
    module, _, attribute = name.partition(":")
    if (cwd := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, cwd)
    try:
        cls = getattr(importlib.import_module(module), attribute)
        made = cls(groups_per_step=rollout.groups_per_step, max_staleness=rollout.max_staleness, **rollout.sampler_args)
    except Exception as error:
        _cannot(f"{name} cannot be made: {type(error).__name__}: {error}", error)
    missing = [
        m for m in METHODS if not callable(getattr(made, m, None)) or inspect.iscoroutinefunction(getattr(made, m))
    ]
    if missing:
        _cannot(
            f"{name} has no method {', '.join(missing)}; all of {', '.join(METHODS)} are needed, none of them async"
        )
    sampler = cast(Sampler, made)
    if getattr(sampler, "groups_per_step", None) != rollout.groups_per_step:
        _cannot(f"{name} has no attribute groups_per_step = {rollout.groups_per_step}")
    capacity = sampler.required_capacity()
    if not isinstance(capacity, int) or capacity < rollout.groups_per_step:  # pyright: ignore[reportUnnecessaryIsInstance]
        _cannot(
            f"{name}.required_capacity() is {capacity!r}: a step needs {rollout.groups_per_step} groups at the same time"
        )
    empty = BufferView(step=0, version=0, last_step=1, entries=LiveGroups())
    if sampler.admit(empty) is None:
        _cannot(f"{name}.admit() lets no group into an empty buffer at step 0: nothing would ever be dispatched")
    return sampler


def _cannot(what: str, cause: Exception | None = None) -> NoReturn:
    raise ConfigError([Problem(path="rollout.sampler", what=what, remedy="docs/samplers.md has an example")]) from cause
