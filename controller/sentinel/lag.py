"""How late the event loop runs what is due, as a histogram: a lag is the delay of one beat beyond its time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

BOUNDS_MS = tuple(round(10 ** (i / 8 - 1), 3) for i in range(57))
"""Upper bounds of the buckets: eight to a decade, 0.1 ms to 1000 s."""
OVER_MS = (1, 3, 5, 10, 30, 100, 1000)
"""The bounds that the metrics count by."""


class LagHistogram:
    """Constant in size; a quantile is exact to a bucket, that is to a third of its value at most."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_MS) + 1)
        self._over = [0] * len(OVER_MS)
        self.count = 0
        self.max_ms = 0.0

    def add(self, lag_ms: float) -> None:
        self._counts[bisect_left(BOUNDS_MS, lag_ms)] += 1
        self.count += 1
        if lag_ms > self.max_ms:
            self.max_ms = lag_ms
        if lag_ms > OVER_MS[0]:
            for i in range(bisect_left(OVER_MS, lag_ms)):
                self._over[i] += 1

    def quantile(self, q: float) -> float:
        """An upper bound of the q-th quantile in ms, at most `max_ms`; 0 when nothing was measured."""
        wanted, seen = q * self.count, 0
        for bound, count in zip((*BOUNDS_MS, self.max_ms), self._counts, strict=True):
            seen += count
            if count and seen >= wanted:
                return min(bound, self.max_ms)
        return 0.0

    def figures(self) -> Mapping[str, float]:
        """`lag_p50_ms`, `lag_p99_ms`, `lag_p999_ms`, `lag_max_ms`, `beats`, and `beats_over_<n>_ms` of `OVER_MS`."""
        return {
            "lag_p50_ms": self.quantile(0.5),
            "lag_p99_ms": self.quantile(0.99),
            "lag_p999_ms": self.quantile(0.999),
            "lag_max_ms": self.max_ms,
            "beats": float(self.count),
            **{f"beats_over_{ms}_ms": float(n) for ms, n in zip(OVER_MS, self._over, strict=True)},
        }
