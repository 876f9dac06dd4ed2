"""SIGINT and SIGTERM: the first one asks the run to stop in order, the second one ends the process at once.

The handlers run in the main thread between two of its instructions, so they also run while something blocks the event loop.
"""

from __future__ import annotations

import _thread
import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from types import FrameType

import anyio

from controller.leaving import leave

_UNHEARD_S = 1.0
"""After so long without a turn of the loop, the person who pressed Ctrl-C is told why nothing happens."""


class Interrupted(Exception):
    """A signal came while nothing was being trained."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(f"{signum.name} before training began")
        self.signal = signum


class Interrupts:
    """Use `open_interrupts`. A signal, or `stop`, cancels the innermost scope."""

    def __init__(self, outermost: anyio.CancelScope) -> None:
        self.on_first: Callable[[str], None] = lambda _: None
        """Told of the first signal, in words for a person."""
        self.blocked_at: Callable[[], str] = lambda: ""
        """What the loop's thread is at; called in another thread."""
        self.signal: signal.Signals | None = None
        """The first signal that came."""
        self._scopes = [outermost]
        self._loop = asyncio.get_running_loop()
        self._heard = False

    @contextmanager
    def scope(self) -> Generator[anyio.CancelScope]:
        """What a signal cancels while inside; cancelled at once when one came before."""
        with anyio.CancelScope() as scope:
            self._scopes.append(scope)
            if self.signal is not None:
                scope.cancel()
            try:
                yield scope
            finally:
                self._scopes.remove(scope)

    def stop(self) -> None:
        """Cancel the innermost scope, as a signal does. Outside of any `scope` it does nothing."""
        if len(self._scopes) > 1:
            self._scopes[-1].cancel()

    @contextmanager
    def handled(self) -> Generator[None]:
        """Receive signals inside. Outside the main thread Python delivers none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        signum = signal.Signals(number)
        if self.signal is not None:
            leave(128 + signum, f"second {signum.name}: leaving at once")
        self.signal = signum
        # Not a `threading.Thread`: the instruction that was interrupted may hold one of that module's locks.
        _thread.start_new_thread(self._say_when_unheard, ())
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        assert self.signal is not None
        self._heard = True
        self.on_first(f"{self.signal.name}: stopping in order; once more ends it at once")
        self._scopes[-1].cancel()

    def _say_when_unheard(self) -> None:
        time.sleep(_UNHEARD_S)
        if not self._heard and self.signal is not None:
            text = (
                f"{self.signal.name}: the event loop is blocked {self.blocked_at()} and cannot stop the run in order; "
            )
            with suppress(OSError):
                os.write(2, f"\n{text}once more ends it at once\n".encode(errors="backslashreplace"))


@asynccontextmanager
async def open_interrupts() -> AsyncGenerator[Interrupts]:
    """Signals are received inside. One that comes outside of any `scope` cancels the body, which then ends without an error;
    `signal` says so."""
    with anyio.CancelScope() as scope:
        interrupts = Interrupts(scope)
        with interrupts.handled():
            yield interrupts
