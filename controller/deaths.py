"""Which of the run's processes died, told to those that only see a connection break."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio


class Deaths:
    """`first` is the error of the first process that died by itself."""

    def __init__(self) -> None:
        self.first: Exception | None = None
        self._news = anyio.Event()

    async def watch(self, process: Callable[[], Awaitable[object]]) -> None:
        """Await `process()`, which raises when its process dies; put that on record and raise it."""
        try:
            await process()
        except Exception as death:
            self.first = self.first or death
            self._news.set()
            raise

    async def news(self, within_s: float) -> None:
        """Wait for a death to become known, shielded, for `within_s` at most."""
        with anyio.move_on_after(within_s, shield=True):
            await self._news.wait()
