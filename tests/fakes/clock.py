"""A virtual clock: an event loop whose time jumps to the next timer as soon as nothing is ready to run.

What takes hours of waiting takes as long as its callbacks do, and equal programs run equally. There are no threads here:
what is given to one runs to its end between two turns of the loop. Inside, `time.monotonic()` is the loop's time too.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import anyio
import anyio.lowlevel
import anyio.to_thread

T = TypeVar("T")

BEGIN_S = 1000.0


class NothingLeft(Exception):
    """Every task waits for something that no timer and no other task will bring."""


def _nothing() -> None:
    pass


class _Jump(selectors.DefaultSelector):
    """Never waits: with nothing ready, the loop's time moves on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = BEGIN_S
        self.on_idle = _nothing
        self.busiest_s = 0.0
        self._turn_began = time.thread_time()

    def select(self, timeout: float | None = None) -> Any:
        self.busiest_s = max(self.busiest_s, time.thread_time() - self._turn_began)
        try:
            ready = super().select(0)
            if not ready and timeout != 0:
                if timeout is None:
                    raise NothingLeft
                look, self.on_idle = self.on_idle, _nothing
                look()
                self.on_idle = look
                self.now += timeout
            return ready
        finally:
            self._turn_began = time.thread_time()


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. Sockets may be open, but what comes over them comes at a time of its own."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def when_idle(self, look: Callable[[], None]) -> None:
        """Call `look` whenever every task waits, before the time moves on; what it raises ends the loop."""
        self._jump.on_idle = look

    @property
    def busiest_ms(self) -> float:
        """The most processor time, in ms, that the loop had to itself between two looks at what is ready."""
        return self._jump.busiest_s * 1000


def run_virtually(main: Callable[..., Awaitable[T]], *args: Any) -> T:
    """`anyio.run`, on a virtual clock."""
    loops: list[VirtualLoop] = []

    def make() -> VirtualLoop:
        loops.append(VirtualLoop())
        return loops[-1]

    with (
        patch.object(time, "monotonic", lambda: loops[-1].time() if loops else BEGIN_S),
        patch.object(anyio.to_thread, "run_sync", _in_turn),
    ):
        return anyio.run(main, *args, backend_options={"loop_factory": make})


async def _in_turn(function: Callable[..., T], *args: Any, **_: Any) -> T:
    await anyio.lowlevel.checkpoint()
    return partial(function, *args)()
