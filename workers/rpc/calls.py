"""Runs each request id at most once, for as long as somebody waits for it.

A repeat of an id joins the running handler or gets the remembered answer. When the last waiter leaves (its connection
broke or its deadline passed) the handler is cancelled, and the id is remembered as cancelled: what the handler had done by
then is unknown, so it is not run again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup
from msgspec.structs import replace

from workers.rpc.errors import Failure
from workers.rpc.wire import Status, encode, sendable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """What goes back to the caller: a status, and the encoded reply or `Failure`."""

    status: Status
    body: bytes

    @classmethod
    def failure(cls, status: Status, failure: Failure) -> Answer:
        return cls(status, encode(replace(failure, message=sendable(failure.message))))


class IdReused(Exception):
    """A request id came back with another method or body."""


class _Call:
    def __init__(self, fingerprint: bytes, where: str) -> None:
        self.fingerprint = fingerprint
        self.where = where
        self.scope = anyio.CancelScope()
        self.done = anyio.Event()
        self.waiters = 0
        self.answer: Answer | None = None
        self.finished_at = 0.0

    def failure(self, status: Status, kind: str, message: str) -> Answer:
        return Answer.failure(status, Failure(kind=kind, message=message, where=self.where))


class Calls:
    """The calls of one server. Answers are remembered for `max_age_s`, at most `max_kept` and `max_kept_bytes` of them."""

    def __init__(
        self, tasks: TaskGroup, *, max_kept: int = 1024, max_kept_bytes: int = 16 * 2**20, max_age_s: float = 60.0
    ) -> None:
        """Handlers run in `tasks`; cancelling it cancels them all."""
        self._tasks = tasks
        self._max_kept = max_kept
        self._max_kept_bytes = max_kept_bytes
        self._max_age_s = max_age_s
        self._running: dict[str, _Call] = {}
        self._kept: dict[str, _Call] = {}
        self._kept_bytes = 0

    @property
    def in_flight(self) -> int:
        """Handlers running now, those still cleaning up after a cancellation included."""
        return len(self._running)

    async def run(
        self, request_id: str, fingerprint: bytes, where: str, work: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """Return `work`'s answer, running it unless `request_id` is known. What `work` raises is logged.

        `fingerprint` identifies method and body; `where` names worker and method in failures. Raises `IdReused` when the
        id is known with another fingerprint. Cancellation leaves the handler running only if another caller waits for it.
        """
        call = self._running.get(request_id) or self._kept.get(request_id)
        if call is None:
            call = self._running[request_id] = _Call(fingerprint, where)
            self._tasks.start_soon(self._execute, request_id, call, work)
        elif call.fingerprint != fingerprint:
            raise IdReused(f"request id {request_id!r} was used for another request")
        call.waiters += 1
        try:
            await call.done.wait()
        finally:
            call.waiters -= 1
            if call.waiters == 0:
                call.scope.cancel()
        assert call.answer is not None
        return call.answer

    async def _execute(self, request_id: str, call: _Call, work: Callable[[], Awaitable[Answer]]) -> None:
        call.answer = call.failure(Status.GONE, "cancelled", "the worker cancelled the call, as it is stopping")
        try:
            with call.scope:
                call.answer = await _contained(call, work)
            if call.scope.cancelled_caught:
                text = "an earlier attempt was cancelled when its caller left; its effect is unknown"
                call.answer = call.failure(Status.FAILED, "cancelled", text)
        finally:
            del self._running[request_id]
            self._keep(request_id, call)
            call.done.set()

    def _keep(self, request_id: str, call: _Call) -> None:
        assert call.answer is not None
        now = call.finished_at = anyio.current_time()
        self._kept[request_id] = call
        self._kept_bytes += len(call.answer.body)
        while self._kept:
            oldest_id, oldest = next(iter(self._kept.items()))
            if (
                len(self._kept) <= self._max_kept
                and self._kept_bytes <= self._max_kept_bytes
                and now - oldest.finished_at <= self._max_age_s
            ):
                return
            del self._kept[oldest_id]
            assert oldest.answer is not None
            self._kept_bytes -= len(oldest.answer.body)


async def _contained(call: _Call, work: Callable[[], Awaitable[Answer]]) -> Answer:
    """`work`'s answer, whatever it raises: an error let out would end the task group, and with it the server."""
    try:
        return await work()
    except anyio.get_cancelled_exc_class():
        if anyio.current_effective_deadline() == -math.inf:
            raise  # this task was cancelled, not only something that the handler awaited
        return call.failure(Status.FAILED, "cancelled", "the handler awaited something that was cancelled")
    except Exception as error:
        logger.exception("%s: the failure could not be encoded", call.where)
        return call.failure(Status.FAILED, type(error).__name__, "the worker's log has the traceback")
