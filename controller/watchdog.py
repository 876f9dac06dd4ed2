"""The stall watchdog: judges progress as (groups committed, steps done) while work remains, and the health of its machinery.

"Something is in flight" is not progress; nothing in flight while work remains is a stall too. A report names the likely
culprit and has the whole wait graph. It runs on the loop; the loop itself is watched by `controller.sentinel`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, TypeAlias

import anyio

from controller.waits.graph import WaitGraph
from controller.waits.text import describe

logger = logging.getLogger(__name__)

Check: TypeAlias = Callable[[], Awaitable[None]]
"""Returns when what it checks is healthy; raises, or does not return, when it is not."""

_LONGEST_TICK_S = 10.0
_AGAIN_S = 1.0
"""What was unwell is looked at again so soon: it is blamed until it is known to be well."""


class RunStalled(Exception):
    """No progress, or no health, for longer than the watchdog allows. The message says who waits for what."""


class NotHealthy(Exception):
    """Of a check. The message says what is wrong."""


class StallWatchdog:
    """`progress()` returns a value that changes with every committed group and finished step. `checks(seconds)`
    gives what is checked at every look, by name; each has that many seconds, the time between two looks."""

    def __init__(
        self,
        *,
        stall_after_s: float,
        action: Literal["warn", "abort"],
        progress: Callable[[], tuple[int, int]],
        graph: Callable[[], WaitGraph],
        checks: Callable[[float], Mapping[str, Check]] = lambda _: {},
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._stall_after_s = stall_after_s
        self._tick_s = min(stall_after_s / 4, _LONGEST_TICK_S)
        self._action = action
        self._progress = progress
        self._graph = graph
        self._checks = checks(self._tick_s)
        self._warn = warn
        self._failing: dict[str, float] = {}
        """Seconds for which a check has failed, by name."""
        self.unhealthy: dict[str, str] = {}
        """Checks that failed at the last look, and what they said."""

    async def run(self) -> None:
        """Watch until cancelled. Raises RunStalled when the action is "abort"; else warns once per period."""
        seen, stalled, looked = self._progress(), 0.0, time.monotonic()
        while True:
            # The watchdog's tick: the one place where the run looks at a clock again and again.
            await anyio.sleep(min(self._tick_s, _AGAIN_S) if self.unhealthy else self._tick_s)
            await self._check()
            now = time.monotonic()
            # Not more than a look takes: in a process that was stopped nothing stalls.
            passed, looked = min(now - looked, 4 * self._tick_s), now
            for name in self._failing:
                self._failing[name] += passed
            progress = self._progress()
            stalled = stalled + passed if progress == seen else 0.0
            seen = progress
            report = self._report(stalled, self._graph())
            if report is None:
                continue
            if self._action == "abort":
                raise RunStalled(report)
            self._warn(report)
            stalled = 0.0
            self._failing = dict.fromkeys(self._failing, 0.0)

    def _report(self, stalled: float, graph: WaitGraph) -> str | None:
        sick = {name: why for name, why in self.unhealthy.items() if self._failing[name] >= self._stall_after_s}
        if stalled < self._stall_after_s and not sick:
            return None
        if stalled >= self._stall_after_s:
            headline = f"no progress for {stalled:.0f} s"
            if graph.culprit is not None:
                headline += f", likely because of the {graph.culprit}"
        else:
            name, why = next(iter(sick.items()))
            headline = f"not healthy for {self._failing[name]:.0f} s: {name}: {why}"
        return f"{headline}\n{describe(graph)}"

    async def _check(self) -> None:
        found: dict[str, str] = {}
        async with anyio.create_task_group() as tg:
            for name, check in self._checks.items():
                tg.start_soon(self._look, name, check, found)
        for name in found.keys() - self.unhealthy.keys():
            logger.warning("%s: not healthy: %s", name, found[name])
        for name in self.unhealthy.keys() - found.keys():
            logger.warning("%s: healthy again", name)
        self.unhealthy = found
        self._failing = {name: self._failing.get(name, 0.0) for name in found}

    async def _look(self, name: str, check: Check, found: dict[str, str]) -> None:
        with anyio.move_on_after(self._tick_s):
            try:
                await check()
            except NotHealthy as error:
                found[name] = str(error)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
            return
        found[name] = f"no answer within {self._tick_s:g} s"
