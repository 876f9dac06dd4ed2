"""Runs a plane's operations on its private loop: conflicting ones in the order of the calls, a bounded number at a time.

An operation whose caller gave up stays in the order until it has ended, so that nothing is built on an unknown outcome.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import anyio

from dataplane.errors import DataPlaneDown
from dataplane.operation import Footprint, Operation, Phase
from dataplane.private_loop import PrivateLoop

_log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_RUNNING = 8
"""TransferQueue saturates at 4 requests at a time; the rest keeps a plane going when a few are stuck at a dead server."""

SETTLE_TIMEOUT_S = 300.0
"""How long an operation may run when its caller no longer waits. Longer than this, the server has lost its request."""


class Scheduler:
    """Callers use `run`; the rest happens on the private loop."""

    def __init__(self, private: PrivateLoop) -> None:
        self._private = private
        self._slots = anyio.Semaphore(MAX_RUNNING)
        self._live: dict[str, dict[Operation[Any], anyio.Event]] = defaultdict(dict)
        self._down: DataPlaneDown | None = None

    async def run(
        self,
        name: str,
        footprint: Footprint,
        work: Callable[[], Awaitable[T]],
        *,
        timeout: float,
        undo: Callable[[], Awaitable[object]] | None = None,
    ) -> T:
        """Carry out `work` and return its value. Raises its error, DataPlaneTimeout, or DataPlaneDown."""
        operation = Operation(name, footprint, work, undo)
        self._private.call(partial(self._admit, operation))
        return await operation.outcome(self._private, timeout)

    def fail(self, error: DataPlaneDown) -> None:
        """End every operation, and each that is still to come, with this error. On the private loop; the first counts."""
        if self._down is None:
            self._down = error
            for partition in self._live.values():
                for operation in partition:
                    operation.cut(_again(error))

    @property
    def unsettled(self) -> int:
        """Writes that go on though their callers gave up waiting."""
        live = [operation for partition in list(self._live.values()) for operation in list(partition)]
        return sum(operation.phase is Phase.ABANDONED for operation in live)

    def _admit(self, operation: Operation[Any]) -> None:
        live = self._live[operation.footprint.partition]
        earlier = [over for other, over in live.items() if operation.footprint.conflicts_with(other.footprint)]
        live[operation] = anyio.Event()
        if self._down is not None:
            operation.cut(_again(self._down))
        self._private.spawn(partial(self._execute, operation, earlier))

    async def _execute(self, operation: Operation[Any], earlier: list[anyio.Event]) -> None:
        try:
            with operation.scope:
                for over in earlier:
                    await over.wait()
                async with self._slots:
                    if operation.begin():
                        await self._perform(operation)
        finally:
            self._leave(operation)
            operation.end()

    async def _perform(self, operation: Operation[Any]) -> None:
        with anyio.move_on_after(SETTLE_TIMEOUT_S) as limit:
            await operation.perform()
        if limit.cancelled_caught:
            footprint = operation.footprint
            _log.error("gave up a %s on partition %r after %g s", operation.name, footprint.partition, SETTLE_TIMEOUT_S)

    def _leave(self, operation: Operation[Any]) -> None:
        live = self._live[operation.footprint.partition]
        live.pop(operation).set()
        if not live:
            del self._live[operation.footprint.partition]


def _again(error: DataPlaneDown) -> DataPlaneDown:
    """Each caller gets an error of its own: they would share a traceback."""
    return DataPlaneDown(str(error))
