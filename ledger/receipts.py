"""The receipt: which calls make up the conversation to be trained, or why there is none. A pure function of the record.

The terminal call is the declared one, without fallback. Without a declaration the calls must single it out, retried calls
with equal tokens counting as one: the only leaf of the only root, or of the only continued root, and the last call made.

A failed call was never answered, so it can only matter as the end that the agent meant and did not get. It rejects the
rollout if it was admitted after the terminal call, unless that was declared or the call was refused unsampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from ledger.errors import IllegalTransition
from ledger.events import RolloutEvent, RolloutOpened
from ledger.links import Link, link_of
from ledger.reasons import CallFailure, Reason, Rejection
from ledger.rollout import Call, CallState, Rollout, RolloutState


class Receipt(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the ledger testifies about a rollout at `version`. It holds no tokens."""

    rollout_id: str
    version: int
    """Number of the rollout's events so far, and their hash chain's head."""
    head: str
    terminal: str | None
    selection: Literal["declared", "unique_leaf"] | None
    chain: tuple[Link, ...]
    """Root first; the last link is the terminal call."""
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


def build(rollout: Rollout) -> Receipt:
    """The receipt of a rollout in any state; unless sealed it is rejected."""
    rejections = _state_rejections(rollout)
    terminal = _declared(rollout, rollout.declared) if rollout.declared is not None else _unique_leaf(rollout)
    if isinstance(terminal, Rejection):
        rejections.append(terminal)
        terminal = None
    selection = None
    if terminal is not None:
        selection = "unique_leaf" if rollout.declared is None else "declared"
    chain = () if terminal is None else tuple(link_of(c.committed, c.finish_reason) for c in terminal.path())
    return Receipt(
        rollout_id=rollout.id,
        version=rollout.version,
        head=rollout.head,
        terminal=None if terminal is None else terminal.id,
        selection=selection,
        chain=chain,
        rejections=tuple(rejections),
        staging_keys=tuple(call.committed.staging_key for call in _committed(rollout)),
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


def _committed(rollout: Rollout) -> list[Call]:
    return [call for call in rollout.calls if call.state is CallState.COMMITTED]


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


def _declared(rollout: Rollout, call_id: str) -> Call | Rejection:
    call = rollout.find(call_id)
    if call is None:
        return Rejection(Reason.UNKNOWN_TERMINAL, f"declared terminal {call_id!r} is no call of the rollout")
    if call.state is CallState.FAILED:
        return Rejection(Reason.CALL_FAILED, f"declared terminal {call_id!r} failed: {call.failure}")
    if call.state is not CallState.COMMITTED:
        return Rejection(Reason.UNSETTLED_CALL, f"declared terminal {call_id!r} has no outcome")
    return call


def _unique_leaf(rollout: Rollout) -> Call | Rejection:
    if not rollout.calls:
        return Rejection(Reason.NO_CALLS, Reason.NO_CALLS.meaning)
    committed = _committed(rollout)
    failed = [call for call in rollout.calls if call.state is CallState.FAILED]
    if not committed:
        if failed:
            return Rejection(Reason.CALL_FAILED, f"no call succeeded; {failed[0].id!r} failed: {failed[0].failure}")
        return Rejection(Reason.UNSETTLED_CALL, "no call has an outcome")
    leaf = _single_out(committed)
    if isinstance(leaf, Rejection):
        return leaf
    last = committed[-1].seq  # Of the leaf, or of a retry that gave the same tokens.
    for call in failed:
        if call.seq > last and call.failure is not CallFailure.REFUSED:
            return Rejection(Reason.CALL_FAILED, f"{call.id!r}, after the last answered call, failed: {call.failure}")
    return leaf


def _single_out(committed: Sequence[Call]) -> Call | Rejection:
    def tokens(call: Call) -> str:
        return call.committed.cumulative_hash

    root_of: dict[str, str] = {}
    """Call id -> the tokens of its root."""
    continued: set[str] = set()
    for call in committed:
        if call.parent is not None:
            continued.add(tokens(call.parent))
        root_of[call.id] = tokens(call) if call.parent is None else root_of[call.parent.id]
    roots = set(root_of.values())
    if len(roots) > 1:
        roots &= continued
    if len(roots) != 1:
        return Rejection(Reason.AMBIGUOUS_TERMINAL, f"{len(roots)} roots qualify; declare the terminal call")
    leaves: dict[str, Call] = {}
    for call in committed:
        if root_of[call.id] in roots and tokens(call) not in continued:
            leaves.setdefault(tokens(call), call)
    if len(leaves) != 1:
        named = [call.id for call in leaves.values()]
        return Rejection(Reason.AMBIGUOUS_TERMINAL, f"leaves {named} qualify; declare the terminal call")
    (leaf,) = leaves.values()
    if tokens(committed[-1]) != tokens(leaf):
        # The conversation may have moved to a new root, e.g. by compaction.
        return Rejection(
            Reason.AMBIGUOUS_TERMINAL,
            f"{committed[-1].id!r} was made after leaf {leaf.id!r}; declare the terminal call",
        )
    return leaf
