"""How long the event loop keeps a task waiting that is ready to run: the delays seen, beyond the time asked for."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskStatus

TICK_S = 0.001


class LoopLag:
    """The delays while any of its `watched` bodies ran, in milliseconds."""

    def __init__(self) -> None:
        self.seen_ms: list[float] = []

    @property
    def max_ms(self) -> float:
        return max(self.seen_ms, default=0.0)

    def quantile_ms(self, share: float) -> float:
        ordered = sorted(self.seen_ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator[None]:
        async with anyio.create_task_group() as tg:
            await tg.start(self._measure)
            yield
            await anyio.sleep(2 * TICK_S)
            tg.cancel_scope.cancel()

    async def _measure(self, *, task_status: TaskStatus[None]) -> None:
        task_status.started()
        while True:
            asleep = time.perf_counter()
            await anyio.sleep(TICK_S)
            self.seen_ms.append((time.perf_counter() - asleep - TICK_S) * 1000)
