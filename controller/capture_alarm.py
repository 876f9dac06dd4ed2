"""The capture alarm: says when custody fails for too many rollouts, which no single placeholder shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from controller.config.schema import FailuresConfig

_FEWEST = 32
"""Rollouts before the share of them says anything."""


class CaptureAlarm:
    """Warns once when the share is above the limit, and again only after it was back at half of it."""

    def __init__(self, config: FailuresConfig, warn: Callable[[str], None]) -> None:
        self._limit = config.capture_alarm_rate
        self._last: deque[bool] = deque(maxlen=config.capture_alarm_rollouts)
        self._failed = 0
        self._warn = warn
        self._raised = False

    def ended(self, *, failed: bool) -> None:
        """A rollout ended; `failed`: because its custody could not be proven."""
        if len(self._last) == self._last.maxlen:
            self._failed -= self._last[0]
        self._last.append(failed)
        self._failed += failed
        if self._limit is None or len(self._last) < min(_FEWEST, self._last.maxlen or _FEWEST):
            return
        share = self._failed / len(self._last)
        if share > self._limit and not self._raised:
            self._raised = True
            self._warn(
                f"custody failed for {self._failed} of the last {len(self._last)} rollouts, more than "
                f"failures.capture_alarm_rate {self._limit:g}: what is trained is no longer what was played. The reasons "
                "are in the metrics (custody/rejected_*); docs/custody.md explains each"
            )
        elif share <= self._limit / 2:
            self._raised = False
