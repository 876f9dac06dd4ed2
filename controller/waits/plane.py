"""A data plane whose operations can be seen while they run: which have had no answer, and how long the last one took."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager

from controller.waiting import Activities, Activity
from dataplane.plane import Column, DataPlane, Row


class WatchedPlane:
    """Does what `plane` does."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._open = Activities()
        self._number = 0
        self.round_trip_s: float | None = None
        """Of the operation that was answered last."""
        self.answered_at: float | None = None
        """time.monotonic()."""

    def open(self) -> list[Activity]:
        """The operations that run, the oldest first."""
        return sorted(self._open.now().values(), key=lambda activity: activity.since)

    async def put(self, partition: str, rows: Mapping[str, Row], *, timeout: float | None = None) -> None:
        with self._watched(f"put of {len(rows)} rows into {partition}"):
            await self._plane.put(partition, rows, timeout=timeout)

    async def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str], *, timeout: float | None = None
    ) -> list[dict[str, Column]]:
        with self._watched(f"get of {len(keys)} rows from {partition}"):
            return await self._plane.get(partition, keys, columns, timeout=timeout)

    async def clear(self, partition: str, keys: Collection[str], *, timeout: float | None = None) -> int:
        with self._watched(f"clear of {len(keys)} rows in {partition}"):
            return await self._plane.clear(partition, keys, timeout=timeout)

    async def keys(self, partition: str, *, prefix: str = "", timeout: float | None = None) -> list[str]:
        with self._watched(f"keys of {partition}"):
            return await self._plane.keys(partition, prefix=prefix, timeout=timeout)

    def take_metrics(self) -> Mapping[str, float]:
        return self._plane.take_metrics()

    async def aclose(self) -> None:
        await self._plane.aclose()

    @contextmanager
    def _watched(self, what: str) -> Generator[None]:
        self._number += 1
        began = time.monotonic()
        with self._open.doing(str(self._number), what):
            yield
        self.answered_at = time.monotonic()
        self.round_trip_s = self.answered_at - began
