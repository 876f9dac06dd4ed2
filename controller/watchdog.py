"""The stall watchdog: judges progress as (groups committed, steps done) while work remains.

"Something is in flight" is not progress; nothing in flight while work remains is a stall too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import anyio

from controller.waiting import Activities


class RunStalled(Exception):
    """No progress for longer than the watchdog allows. The message says what everything was waiting for."""


class StallWatchdog:
    """`progress()` returns a value that changes with every committed group and finished step."""

    def __init__(
        self,
        *,
        stall_after_s: float,
        action: Literal["warn", "abort"],
        progress: Callable[[], tuple[int, int]],
        activities: Activities,
        describe: Callable[[], str],
        warn: Callable[[str], None],
    ) -> None:
        self._stall_after_s = stall_after_s
        self._action = action
        self._progress = progress
        self._activities = activities
        self._describe = describe
        self._warn = warn

    async def run(self) -> None:
        """Watch until cancelled. Raises RunStalled when the action is "abort"; else warns once per period."""
        seen, since = self._progress(), time.monotonic()
        while True:
            # The watchdog's tick: the one place where the run looks at a clock again and again.
            await anyio.sleep(min(self._stall_after_s / 4, 10.0))
            now = self._progress()
            if now != seen:
                seen, since = now, time.monotonic()
                continue
            stalled = time.monotonic() - since
            if stalled < self._stall_after_s:
                continue
            groups, steps = now
            report = (
                f"no progress for {stalled:.0f} s ({groups} groups committed, {steps} steps done)\n"
                f"{self._describe()}\n{self._activities.describe()}"
            )
            if self._action == "abort":
                raise RunStalled(report)
            self._warn(report)
            since = time.monotonic()
