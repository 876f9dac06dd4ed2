"""Where a run's rollouts and groups went, those before a resume included.

The ledger's own account goes on from process to process; what it counted before this one is replaced by the checkpoint's
numbers, so that what was lost with a crash, and is played again, counts once.
"""

from __future__ import annotations

from controller.buffer import GroupState, ReplayBuffer
from controller.checkpoint import ControllerState
from controller.reporting.summary import Accounts
from ledger.ledger import Ledger

ENDS = ("trained", "evicted", "dropped", "aborted")


class RunAccount:
    """`resumed` is the checkpoint's state; what ended in `ledger` so far is not counted."""

    def __init__(self, ledger: Ledger, buffer: ReplayBuffer, resumed: ControllerState | None) -> None:
        self._ledger = ledger
        self._buffer = buffer
        self._origin = ledger.account
        self._rollouts = {end: 0 if resumed is None else resumed.rollouts.get(end, 0) for end in ENDS}
        self._groups = {end: 0 if resumed is None else resumed.groups.get(end, 0) for end in ENDS}

    def rollout_ends(self) -> dict[str, int]:
        """Rollouts by end."""
        account, origin = self._ledger.account, self._origin
        return {end: self._rollouts[end] + getattr(account, end) - getattr(origin, end) for end in ENDS}

    def group_ends(self) -> dict[str, int]:
        """Groups by end."""
        return {end: self._groups[end] + self._buffer.ended[GroupState(end)] for end in ENDS}

    def counts(self) -> dict[str, int]:
        """Rollouts: dispatched, each end, and live."""
        ends, live = self.rollout_ends(), self._ledger.account.live
        return {"dispatched": live + sum(ends.values()), **ends, "live": live}

    def rollouts(self) -> Accounts:
        """Of the rollouts; what was dispatched is counted apart from the ends, so that the two can be held together."""
        account = self._ledger.account
        return Accounts(
            dispatched=sum(self._rollouts.values()) + account.dispatched - self._origin.dispatched,
            **self.rollout_ends(),
            lost=account.lost,
            duplicated=account.duplicated,
        )

    def groups(self, dispatched: int) -> Accounts:
        """Of the groups, of which this process dispatched so many."""
        return Accounts(dispatched=sum(self._groups.values()) + dispatched, **self.group_ends())
