"""One call of a plane, shared by two threads: the caller awaits its outcome, the private loop carries it out.

A write that has started is never cancelled. When its caller stops waiting it goes on to its end, and is then undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import anyio

from dataplane.errors import DataPlaneDown, DataPlaneTimeout
from dataplane.private_loop import PrivateLoop

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Footprint:
    """What an operation touches: keys of a partition (None: all of them), and whether it changes them."""

    partition: str
    keys: frozenset[str] | None
    writes: bool

    def conflicts_with(self, other: Footprint) -> bool:
        """Whether the two must take effect in order."""
        if self.partition != other.partition or not (self.writes or other.writes):
            return False
        return self.keys is None or other.keys is None or not self.keys.isdisjoint(other.keys)


class Phase(enum.Enum):
    QUEUED = "waits for its turn; nothing was sent"
    RUNNING = "talks to the servers"
    WITHDRAWN = "given up by its caller before it could change anything; ends at once"
    ABANDONED = "a write given up by its caller; ends in its own time, and is then undone"
    ENDED = "has a value or an error"


class Operation(Generic[T]):
    """A state machine: QUEUED -> RUNNING -> ENDED; QUEUED -> WITHDRAWN; RUNNING -> WITHDRAWN (reads), ABANDONED (writes).

    Created on the caller's loop. `undo` reverts a write that succeeded after its caller had given up.
    """

    def __init__(
        self,
        name: str,
        footprint: Footprint,
        work: Callable[[], Awaitable[T]],
        undo: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self.name = name
        self.footprint = footprint
        self.scope = anyio.CancelScope()
        """Encloses the operation on the private loop."""
        self._work = work
        self._undo = undo
        self._lock = threading.Lock()
        self._phase = Phase.QUEUED
        self._value: T | None = None
        self._error: Exception | None = DataPlaneDown(
            f"this {name} was cut short (the plane was closed, or its server lost the request); its outcome is unknown"
        )
        self._caller_loop = asyncio.get_running_loop()
        self._ended = anyio.Event()

    @property
    def phase(self) -> Phase:
        return self._phase

    async def outcome(self, private: PrivateLoop, timeout: float) -> T:
        """Wait, on the caller's loop, for the value or the error, at most `timeout` seconds.

        A cancellation is delivered at once while nothing can have changed, and otherwise when the write has ended.
        """
        deadline = anyio.current_time() + timeout
        try:
            with anyio.CancelScope(deadline=deadline):
                await self._ended.wait()
        except anyio.get_cancelled_exc_class():
            if not self._withdraw(private):
                with anyio.CancelScope(deadline=deadline, shield=True):
                    await self._ended.wait()
                self._abandon()
            raise
        if self._withdraw(private):
            raise DataPlaneTimeout(self.name, partition=self.footprint.partition, seconds=timeout, outcome="none")
        if self._abandon():
            raise DataPlaneTimeout(self.name, partition=self.footprint.partition, seconds=timeout, outcome="unknown")
        if self._error is not None:
            raise self._error
        return cast("T", self._value)

    def begin(self) -> bool:
        """QUEUED -> RUNNING; False when it was withdrawn."""
        return self._move({Phase.QUEUED}, Phase.RUNNING)

    async def perform(self) -> None:
        """Do the work, on the private loop, and store what came of it, or undo it when nobody waits any more."""
        try:
            value = await self._work()
        except Exception as error:
            self._finish(None, error)
            return
        if self._finish(value, None) or self._phase is not Phase.ABANDONED or self._undo is None:
            return
        try:
            await self._undo()
        except Exception:
            _log.exception("a %s that ended after its deadline could not be undone", self.name)

    def cut(self, error: DataPlaneDown) -> None:
        """Stop it where it is, with this error. On the private loop."""
        with self._lock:
            if self._phase is not Phase.ENDED:
                self._error = error
        self.scope.cancel()

    def end(self) -> None:
        """Wake the caller: the value or the error is there, or will never be. Last call on the private loop."""
        self._move({Phase.QUEUED, Phase.RUNNING, Phase.ABANDONED}, Phase.ENDED)
        try:
            self._caller_loop.call_soon_threadsafe(self._ended.set)
        except RuntimeError:
            _log.debug("the loop that called this %s has ended", self.name)

    def _finish(self, value: T | None, error: Exception | None) -> bool:
        with self._lock:
            if self._phase is not Phase.RUNNING:
                return False
            self._value, self._error, self._phase = value, error, Phase.ENDED
            return True

    def _withdraw(self, private: PrivateLoop) -> bool:
        withdrawable = {Phase.QUEUED} if self.footprint.writes else {Phase.QUEUED, Phase.RUNNING}
        if not self._move(withdrawable, Phase.WITHDRAWN):
            return False
        with contextlib.suppress(DataPlaneDown):
            private.call(self.scope.cancel)
        return True

    def _abandon(self) -> bool:
        return self._move({Phase.RUNNING}, Phase.ABANDONED)

    def _move(self, sources: set[Phase], target: Phase) -> bool:
        with self._lock:
            if self._phase not in sources:
                return False
            self._phase = target
            return True
