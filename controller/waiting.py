"""What each part of the run is doing, since when, and what it waits for: the answer to "why is it not moving?"."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

LOOP = "event loop"
TRAIN_PUMP = "train pump"
ROLLOUT_PUMP = "rollout pump"
FINALIZER = "finalizer"
BUFFER = "replay buffer"
EVALUATION = "evaluation"
PROMPTS = "prompts"
ENVIRONMENT = "environment"
TRAINER = "training worker"
SYNC = "weight sync"
PLANE = "data plane"
ENGINES = "generation workers"


@dataclass(frozen=True, eq=False)
class Activity:
    what: str
    since: float
    """time.monotonic()."""
    on: str = ""
    """The part that it waits for, if it is another one."""
    at: Callable[[], str] = str
    """Where its code stands, if that is known."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


class Activities:
    """Named parts of the run and what they do. Parts that do nothing are absent."""

    def __init__(self) -> None:
        self._now: dict[str, dict[Activity, None]] = {}

    @contextmanager
    def doing(self, part: str, what: str, *, on: str = "", at: Callable[[], str] = str) -> Generator[None]:
        """Mark `part` as doing `what` inside; an activity around it, or beside it, shows again afterwards."""
        activity = Activity(what, time.monotonic(), on, at)
        self._now.setdefault(part, {})[activity] = None
        try:
            yield
        finally:
            begun = self._now[part]
            del begun[activity]
            if not begun:
                del self._now[part]

    def now(self) -> dict[str, Activity]:
        """What each part began last."""
        return {part: next(reversed(begun)) for part, begun in tuple(self._now.items())}

    def oldest(self, number: int) -> list[tuple[str, Activity, Activity]]:
        """The parts that began first, each with the first of all that it does and the latest."""
        oldest = islice(self._now.items(), number)  # In the order of their beginning, as a part that ends leaves.
        return [(part, next(iter(begun)), next(reversed(begun))) for part, begun in oldest]

    def __len__(self) -> int:
        return len(self._now)
