"""What each part of the run is doing, and since when: the answer to "why is it not moving?"."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Activity:
    what: str
    since: float
    """time.monotonic()."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


class Activities:
    """Named parts of the run and their present activity. Parts that do nothing are absent."""

    def __init__(self) -> None:
        self._now: dict[str, Activity] = {}

    @contextmanager
    def doing(self, part: str, what: str) -> Generator[None]:
        """Mark `part` as doing `what` inside; the activity around it shows again afterwards."""
        before = self._now.get(part)
        self._now[part] = Activity(what, time.monotonic())
        try:
            yield
        finally:
            if before is None:
                del self._now[part]
            else:
                self._now[part] = before

    def now(self) -> dict[str, Activity]:
        return dict(self._now)

    def describe(self) -> str:
        """One line a part, longest first."""
        rows = sorted(self._now.items(), key=lambda item: item[1].since)
        return "\n".join(f"  {part}: {a.what}, for {a.seconds:.1f} s" for part, a in rows)
