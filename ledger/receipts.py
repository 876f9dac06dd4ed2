"""The receipt: which calls make up what is to be trained, or why there is nothing. A pure function of the record.

With trajectory `terminal` that is the conversation up to the terminal call. With `branches` it is every conversation that
the rollout had, and that no terminal call is singled out is no reason against it, unless the end is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from ledger import terminal
from ledger.errors import IllegalTransition
from ledger.events import RolloutEvent, RolloutOpened, Trajectory
from ledger.links import Link, link_of
from ledger.reasons import Reason, Rejection
from ledger.rollout import Call, CallState, Rollout, RolloutState
from ledger.terminal import Selection, Terminal


class Receipt(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the ledger testifies about a rollout at `version`. It holds no tokens."""

    rollout_id: str
    version: int
    """Number of the rollout's events so far, and their hash chain's head."""
    head: str
    trajectory: Trajectory
    terminal: str | None
    """None also when the trajectory is `branches` and nothing singles one out."""
    selection: Selection | None
    chain: tuple[Link, ...]
    """Root first; the last link is the terminal call."""
    branches: tuple[tuple[Link, ...], ...]
    """With trajectory `branches`: the conversations that end elsewhere, each like `chain`, in order of their last calls."""
    rejections: tuple[Rejection, ...]
    """Empty for a trainable rollout; the first is the one to report."""
    staging_keys: tuple[str, ...]
    """Staged rows of all committed calls, on the chain or not: what to clear in the end."""
    orphans: tuple[str, ...]
    """Calls without an answer. What they may have staged all the same has a key that begins with `<call id>-`."""

    @property
    def verdict(self) -> Literal["trainable", "rejected"]:
        return "rejected" if self.rejections else "trainable"

    @property
    def reason(self) -> Reason | None:
        return self.rejections[0].reason if self.rejections else None

    @property
    def conversations(self) -> tuple[tuple[Link, ...], ...]:
        """All that is to be trained, that of the terminal call first."""
        return (self.chain, *self.branches) if self.chain else self.branches


def build(rollout: Rollout) -> Receipt:
    """The receipt of a rollout in any state; unless sealed it is rejected."""
    rejections = _state_rejections(rollout)
    end = _end(rollout)
    if isinstance(end, Rejection):
        rejections.append(end)
        end = None
    links = {call.id: link_of(call.committed, call.finish_reason) for call in terminal.committed(rollout)}

    def chain(call: Call) -> tuple[Link, ...]:
        return tuple(links[c.id] for c in call.path())

    branches: list[Call] = []
    if rollout.trajectory == "branches":
        own = None if end is None else terminal.tokens(end.call)
        branches = [leaf for leaf in terminal.leaves(terminal.committed(rollout)) if terminal.tokens(leaf) != own]
    return Receipt(
        rollout_id=rollout.id,
        version=rollout.version,
        head=rollout.head,
        trajectory=rollout.trajectory,
        terminal=None if end is None else end.call.id,
        selection=None if end is None else end.selection,
        chain=() if end is None else chain(end.call),
        branches=tuple(chain(leaf) for leaf in branches),
        rejections=tuple(rejections),
        staging_keys=tuple(link.staging_key for link in links.values()),
        orphans=tuple(call.id for call in rollout.calls if call.state in (CallState.FAILED, CallState.ABORTED)),
    )


def rebuild(events: Iterable[RolloutEvent]) -> Receipt:
    """The receipt that a rollout's events, read back from a log, testify to; an impossible sequence raises a LedgerError."""
    first, *rest = events
    if not isinstance(first, RolloutOpened):
        raise IllegalTransition(f"rollout {first.rollout_id!r}", "not open", type(first).__name__)
    rollout = Rollout(first)
    for event in rest:
        rollout.apply(event)
    return build(rollout)


def _end(rollout: Rollout) -> Terminal | Rejection | None:
    """The terminal call, why there is none, or None where none is needed."""
    if rollout.trajectory == "echo":
        return None
    end = terminal.select(rollout)
    if rollout.trajectory == "branches" and isinstance(end, Rejection) and end.reason is Reason.AMBIGUOUS_TERMINAL:
        return None
    return end


def _state_rejections(rollout: Rollout) -> list[Rejection]:
    rejections: list[Rejection] = []
    if rollout.failure is not None:
        rejections.append(Rejection(rollout.failure, rollout.failure.meaning))
    if rollout.state is RolloutState.ABORTED:
        rejections.append(Rejection(Reason.ABORTED, rollout.abort_reason))
    if rollout.state is RolloutState.OPEN:
        rejections.append(Rejection(Reason.NOT_SEALED, Reason.NOT_SEALED.meaning))
    unsettled = [call.id for call in rollout.calls if call.state in (CallState.ADMITTED, CallState.ABORTED)]
    if unsettled:
        rejections.append(Rejection(Reason.UNSETTLED_CALL, f"calls {unsettled} have no outcome"))
    return rejections
