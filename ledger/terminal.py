"""Which call is the end of the conversation to be trained, and which conversations a rollout has.

The terminal call is the declared one, without fallback. Without a declaration, witnesses may say which answer was scored,
and must agree. Where none says so, the calls must single it out, retried calls with equal tokens counting as one: the only
leaf of the only root, or of the only continued root, and the last call made.

A failed call was never answered, so it can only matter as the end that the agent meant and did not get. It rejects the
rollout if it was admitted after the last answered call, unless the terminal was declared or witnessed, or the call was
refused unsampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ledger.reasons import CallFailure, Reason, Rejection
from ledger.rollout import Call, CallState, Rollout

Selection = Literal["declared", "witnessed", "unique_leaf"]


class Terminal(NamedTuple):
    call: Call
    selection: Selection


def select(rollout: Rollout) -> Terminal | Rejection:
    """The terminal call; AMBIGUOUS_TERMINAL when the calls could mean several."""
    if rollout.declared is not None:
        declared = _declared(rollout, rollout.declared)
        return declared if isinstance(declared, Rejection) else Terminal(declared, "declared")
    witnessed = _witnessed(rollout)
    if witnessed is not None:
        return witnessed if isinstance(witnessed, Rejection) else Terminal(witnessed, "witnessed")
    leaf = no_end(rollout) or _single_out(committed(rollout))
    return leaf if isinstance(leaf, Rejection) else Terminal(leaf, "unique_leaf")


def no_end(rollout: Rollout) -> Rejection | None:
    """Why the calls cannot hold the rollout's end, wherever it is."""
    if not rollout.calls:
        return Rejection(Reason.NO_CALLS, Reason.NO_CALLS.meaning)
    failed = [call for call in rollout.calls if call.state is CallState.FAILED]
    answered = committed(rollout)
    if not answered:
        if failed:
            why = f"no call succeeded; {failed[0].id!r} failed: {failed[0].failure}"
            return Rejection(Reason.CALL_FAILED, why, failed[0].failure)
        return Rejection(Reason.UNSETTLED_CALL, "no call has an outcome")
    for call in failed:
        if call.seq > answered[-1].seq and call.failure is not CallFailure.REFUSED:
            why = f"{call.id!r}, after the last answered call, failed: {call.failure}"
            return Rejection(Reason.CALL_FAILED, why, call.failure)
    return None


def leaves(calls: Sequence[Call]) -> list[Call]:
    """The committed calls that no other continues, in order; of those with equal tokens the first."""
    continued = {tokens(call.parent) for call in calls if call.parent is not None}
    unique: dict[str, Call] = {}
    for call in calls:
        if tokens(call) not in continued:
            unique.setdefault(tokens(call), call)
    return list(unique.values())


def committed(rollout: Rollout) -> list[Call]:
    return [call for call in rollout.calls if call.state is CallState.COMMITTED]


def tokens(call: Call) -> str:
    """What a committed call's whole conversation hashes to."""
    return call.committed.cumulative_hash


def _declared(rollout: Rollout, name: str) -> Call | Rejection:
    call = rollout.find(name)
    if call is None:
        return Rejection(Reason.UNKNOWN_TERMINAL, f"declared terminal {name!r} is no call of the rollout")
    if call.state is CallState.FAILED:
        return Rejection(Reason.CALL_FAILED, f"declared terminal {name!r} failed: {call.failure}", call.failure)
    if call.state is not CallState.COMMITTED:
        return Rejection(Reason.UNSETTLED_CALL, f"declared terminal {name!r} has no outcome")
    return call


def _witnessed(rollout: Rollout) -> Call | Rejection | None:
    """None when no witness names one conversation."""
    named: dict[str, Call] = {}
    for calls in rollout.witnesses.values():
        found = [rollout.call(call_id) for call_id in calls]
        if len({tokens(call) for call in found}) == 1:
            named.setdefault(tokens(found[0]), found[0])
    if len(named) > 1:
        ids = [call.id for call in named.values()]
        return Rejection(Reason.CONFLICTING_WITNESSES, f"they name {ids}; declare the terminal call")
    return next(iter(named.values()), None)


def _single_out(calls: Sequence[Call]) -> Call | Rejection:
    root_of: dict[str, str] = {}
    """Call id -> the tokens of its root."""
    continued: set[str] = set()
    for call in calls:
        if call.parent is not None:
            continued.add(tokens(call.parent))
        root_of[call.id] = tokens(call) if call.parent is None else root_of[call.parent.id]
    roots = set(root_of.values())
    if len(roots) > 1:
        roots &= continued
    if len(roots) != 1:
        return Rejection(Reason.AMBIGUOUS_TERMINAL, f"{len(roots)} roots qualify; declare the terminal call")
    candidates = [call for call in leaves(calls) if root_of[call.id] in roots]
    if len(candidates) != 1:
        named = [call.id for call in candidates]
        return Rejection(Reason.AMBIGUOUS_TERMINAL, f"leaves {named} qualify; declare the terminal call")
    (leaf,) = candidates
    if tokens(calls[-1]) != tokens(leaf):
        # The conversation may have moved to a new root, e.g. by compaction.
        return Rejection(
            Reason.AMBIGUOUS_TERMINAL,
            f"{calls[-1].id!r} was made after leaf {leaf.id!r}; declare the terminal call",
        )
    return leaf
