"""One thread that runs blocking calls in order and never holds up the process's exit.

anyio's worker threads are joined when the interpreter exits, so a hung disk or a stopped terminal would keep a finished
run alive. This thread is a daemon: what it is stuck in dies with the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


class DaemonThread:
    """Starts with its first call."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=name, daemon=True)

    async def call(self, function: Callable[[], T]) -> T:
        """The result of `function()`, run in the thread after the calls before it.

        Cancellation abandons the call: one that has not begun never runs, one that has goes on without its caller.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        if self._thread.ident is None:
            self._thread.start()
        self._calls.put(run)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Lets the thread end once it has done what it was given. Does not wait."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
