"""Idempotency keys: a call that is made again under its key is the same call. It is generated once and answered each time.

A repeat joins the call while it runs, and gets its answer once that is committed. A call that failed, or that everybody who
waited for it has left, is forgotten at once: the next repeat makes a new one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup

from ledger.http.answers import Answer
from ledger.http.errors import ApiError, refused


class _Call:
    def __init__(self, fingerprint: bytes) -> None:
        self.fingerprint = fingerprint
        self.scope = anyio.CancelScope()
        self.done = anyio.Event()
        self.waiters = 0
        self.outcome: Answer | ApiError | None = None


class Replays:
    """Calls run in `tasks`. Memory holds the answers of the rollouts that were not forgotten."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._rollouts: dict[str, dict[str, _Call]] = {}

    async def run(
        self, rollout_id: str, key: str, fingerprint: bytes, work: Callable[[], Awaitable[Answer | ApiError]]
    ) -> Answer | ApiError:
        """`work`'s outcome, or that of the call that has the key already. `fingerprint` identifies the request.

        An ApiError when the key was used for another request. A cancellation ends the call too, unless somebody else
        waits for it.
        """
        calls = self._rollouts.setdefault(rollout_id, {})
        call = calls.get(key)
        if call is None:
            call = calls[key] = _Call(fingerprint)
            self._tasks.start_soon(self._execute, rollout_id, key, call, work)
        elif call.fingerprint != fingerprint:
            return refused(
                f"the Idempotency-Key {key!r} was used for another request of this rollout; use a new key for a new request",
                code="idempotency_key_reused",
            )
        call.waiters += 1
        try:
            await call.done.wait()
        finally:
            call.waiters -= 1
            if call.waiters == 0 and not call.done.is_set():
                self._drop(rollout_id, key, call)
                call.scope.cancel()
        assert call.outcome is not None
        return call.outcome

    def forget(self, rollout_id: str) -> None:
        """The rollout is over: its answers are not repeated any more."""
        self._rollouts.pop(rollout_id, None)

    async def _execute(
        self, rollout_id: str, key: str, call: _Call, work: Callable[[], Awaitable[Answer | ApiError]]
    ) -> None:
        call.outcome = ApiError(503, "ended", "the call was ended before it had an answer")
        try:
            with call.scope:
                call.outcome = await work()
        finally:
            if isinstance(call.outcome, ApiError):
                self._drop(rollout_id, key, call)
            call.done.set()

    def _drop(self, rollout_id: str, key: str, call: _Call) -> None:
        calls = self._rollouts.get(rollout_id, {})
        if calls.get(key) is call:
            del calls[key]
            if not calls:
                del self._rollouts[rollout_id]
