"""How long the event loop keeps a task waiting that is ready to run: the largest delay seen, beyond the time asked for."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskStatus

TICK_S = 0.001


class LoopLag:
    """The largest delay while any of its `watched` bodies ran."""

    def __init__(self) -> None:
        self.max_ms = 0.0

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
            self.max_ms = max(self.max_ms, (time.perf_counter() - asleep - TICK_S) * 1000)
