"""SIGINT and SIGTERM: the first one asks the run to stop in order, the second one ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager

import anyio
from anyio.abc import TaskStatus

from workers.launch import remove_socket_folders


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
        self.signal: signal.Signals | None = None
        """The first signal that came."""
        self._scopes = [outermost]

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

    async def receive(self, *, task_status: TaskStatus[None]) -> None:
        """Receive signals until cancelled. Outside the main thread Python delivers none, and this returns."""
        if threading.current_thread() is not threading.main_thread():
            task_status.started()
            return
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for signum in signals:
                if self.signal is not None:
                    _leave(signum)
                self.signal = signum
                self.on_first(f"{signum.name}: stopping in order; once more ends it at once")
                self._scopes[-1].cancel()


@asynccontextmanager
async def open_interrupts() -> AsyncGenerator[Interrupts]:
    """Signals are received inside. One that comes outside of any `scope` cancels the body, which then ends without an error;
    `signal` says so."""
    async with anyio.create_task_group() as tg:
        interrupts = Interrupts(tg.cancel_scope)
        await tg.start(interrupts.receive)
        yield interrupts
        tg.cancel_scope.cancel()


def _leave(signum: signal.Signals) -> None:
    """End the process without clean-up. Worker processes see their lifeline break and end by themselves."""
    show_cursor = "\x1b[?25h\n" if sys.stdout.isatty() else "\n"
    os.write(2, f"{show_cursor}second {signum.name}: leaving at once\n".encode())
    remove_socket_folders()
    os._exit(128 + signum)
