"""An event loop on a thread of its own: whatever runs there, however long it blocks, other loops stay free."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import anyio
from anyio.abc import TaskGroup

from dataplane.errors import DataPlaneDown

_log = logging.getLogger(__name__)


class PrivateLoop:
    """Runs tasks for other threads. They must not raise; they end by themselves, or by `aclose`."""

    def __init__(self, name: str) -> None:
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._tasks: TaskGroup
        self._services: TaskGroup
        self._context: contextvars.Context
        self._stop: anyio.Event
        self._grace = 0.0
        self._on_exit: Callable[[], None] | None = None

    async def start(self) -> None:
        with anyio.CancelScope(shield=True):
            self._thread.start()
            self._loop = await asyncio.wrap_future(self._ready)

    def call(self, function: Callable[[], object]) -> None:
        """Have `function` called on the loop, in the order of the calls. Returns at once; any thread may call.

        Raises DataPlaneDown when the loop has ended.
        """
        try:
            # In this loop's own context: the caller's does not say that anyio runs here, unless anyio runs there too.
            self._loop.call_soon_threadsafe(function, context=self._context)
        except RuntimeError as error:
            raise DataPlaneDown("this plane was closed") from error

    def spawn(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task. Only on the loop itself, in a function given to `call`."""
        self._tasks.start_soon(task)

    def spawn_service(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task that nobody waits for: the close cancels it at once. Only on the loop itself."""
        self._services.start_soon(task)

    async def aclose(self, *, grace: float, limit: float, on_exit: Callable[[], None]) -> None:
        """Let the tasks end for `grace` seconds, cancel the rest, then call `on_exit` on the loop, and end the thread.

        Returns after `limit` seconds even when the thread is stuck in a call that blocks; it is a daemon thread.
        """
        self._grace, self._on_exit = grace, on_exit
        self.call(self._stop_serving)
        await anyio.to_thread.run_sync(self._thread.join, limit, limiter=anyio.CapacityLimiter(1))
        if self._thread.is_alive():
            _log.error("the thread %r did not end within %g s and is left behind", self._thread.name, limit)

    def _run(self) -> None:
        # TransferQueue and pyzmq are written for asyncio's own loop, whatever loop the application runs.
        anyio.run(self._serve, backend="asyncio", backend_options={"loop_factory": asyncio.SelectorEventLoop})

    async def _serve(self) -> None:
        self._stop = anyio.Event()
        async with anyio.create_task_group() as self._tasks, anyio.create_task_group() as self._services:
            self._context = contextvars.copy_context()
            self._ready.set_result(asyncio.get_running_loop())
            await self._stop.wait()
            self._tasks.cancel_scope.deadline = anyio.current_time() + self._grace
            self._services.cancel_scope.cancel()
        if self._on_exit is not None:
            self._on_exit()

    def _stop_serving(self) -> None:
        self._stop.set()
