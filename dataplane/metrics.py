"""What a plane has done since it was last asked, in numbers for a report. Any thread may add."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager


class Metrics:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._sums[name] += amount

    @contextmanager
    def timed(self, name: str) -> Generator[None]:
        """Add to `NAME_calls` and, in seconds, to `NAME_s`; the longest call is `NAME_max_s`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            with self._lock:
                self._sums[f"{name}_calls"] += 1
                self._sums[f"{name}_s"] += seconds
                self._sums[f"{name}_max_s"] = max(self._sums[f"{name}_max_s"], seconds)

    def take(self) -> dict[str, float]:
        """The numbers since the last call."""
        with self._lock:
            taken, self._sums = self._sums, defaultdict(float)
        return dict(taken)
