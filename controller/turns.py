"""Deadlines of rollouts and of their turns: what an environment does between two model calls must not take for ever either.

The turn's clock stands still while a call of the rollout is under way; the call has a deadline of its own.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager

import anyio

from ledger.reasons import Reason


class _Played:
    def __init__(self, scope: anyio.CancelScope, end: float) -> None:
        self.scope = scope
        self.end = end
        self.calls = 0


class Overdue:
    """`reason` is set once the rollout has missed a deadline."""

    reason: Reason | None = None


class Turns:
    """`timeout_s`: of one turn; one object serves all rollouts of a run."""

    def __init__(self, timeout_s: float = math.inf) -> None:
        self._timeout_s = timeout_s
        self._played: dict[str, _Played] = {}

    @contextmanager
    def playing(self, rollout_id: str, *, timeout_s: float) -> Generator[Overdue]:
        """The block is cancelled `timeout_s` from now, or when a turn takes too long; what it yields then says which."""
        overdue = Overdue()
        end = anyio.current_time() + timeout_s
        with anyio.CancelScope() as scope:
            played = self._played[rollout_id] = _Played(scope, end)
            self._begin_turn(played)
            try:
                yield overdue
            finally:
                del self._played[rollout_id]
        if scope.cancelled_caught:
            overdue.reason = Reason.TURN_TIMEOUT if scope.deadline < end else Reason.ROLLOUT_TIMEOUT

    @contextmanager
    def in_call(self, rollout_id: str) -> Generator[None]:
        """A model call of the rollout is under way. Of one that is not being played it means nothing."""
        played = self._played.get(rollout_id)
        if played is None:
            yield
            return
        played.calls += 1
        played.scope.deadline = played.end
        try:
            yield
        finally:
            played.calls -= 1
            if not played.calls and not played.scope.cancel_called:
                self._begin_turn(played)

    def _begin_turn(self, played: _Played) -> None:
        played.scope.deadline = min(played.end, anyio.current_time() + self._timeout_s)
