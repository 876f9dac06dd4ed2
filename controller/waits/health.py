"""The health checks of what a run depends on, for the stall watchdog. Each raises when something is wrong, or hangs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Coroutine
from typing import Any

import anyio
import numpy as np

from controller.foreign import await_foreign
from controller.generation_pool import GenerationPool
from controller.member import WorkerState
from controller.waiting import ENGINES, ENVIRONMENT, PLANE
from controller.watchdog import Check, NotHealthy
from dataplane.plane import DataPlane
from dataplane.schema import HEALTH
from workers.environments.base import Environment

_ROWS = 4
"""As many rows as reach each storage unit, most likely."""
_GRACE_S = 1.0


def checks_of(
    environment: Environment, pool: GenerationPool, plane: DataPlane, *, timeout_s: float
) -> dict[str, Check]:
    """By the name of what is checked. `timeout_s` bounds each operation of the data plane."""
    numbers = itertools.count()

    async def engines() -> None:
        # At the run's start they join, in their own time.
        if not any(member.state in (WorkerState.SERVING, WorkerState.JOINING) for member in pool.members):
            states = "; ".join(f"{m.name} {m.state}: {m.why}" for m in pool.members)
            raise NotHealthy(f"none serves ({states})")

    async def round_trip() -> None:
        keys = [f"{os.getpid()}-{next(numbers)}" for _ in range(_ROWS)]
        rows = {key: {"probe": np.array([number], dtype=np.int64)} for number, key in enumerate(keys)}
        try:
            await plane.put(HEALTH, rows, timeout=timeout_s)
            read = await plane.get(HEALTH, keys, ["probe"], timeout=timeout_s)
        finally:
            # What a plane that does not answer keeps of them is swept when the run ends; that it does not is to be told now.
            with anyio.move_on_after(_GRACE_S, shield=True):
                await plane.clear(HEALTH, keys, timeout=_GRACE_S)
        if [int(row["probe"][0]) for row in read] != list(range(_ROWS)):
            raise NotHealthy(f"it gave back other rows than it was given: {read}")

    found: dict[str, Check] = {ENGINES: engines, PLANE: round_trip}
    health = getattr(environment, "health", None)
    if callable(health):

        async def own() -> None:
            async def call() -> None:
                answer: Coroutine[Any, Any, Any] = health()  # type: ignore[assignment]
                await answer

            await await_foreign(call(), "the environment's health()", on_cancel=lambda: None, grace_s=_GRACE_S)

        found[ENVIRONMENT] = own
    return found
