"""What an open or sealed rollout's record holds, for people and programs outside of the controller. It holds no tokens."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from ledger import receipts
from ledger.reasons import CallFailure
from ledger.receipts import Receipt
from ledger.records import CallCoords, FinishReason
from ledger.rollout import Call, CallState, Rollout, RolloutState


class RolloutEntry(Struct, frozen=True, kw_only=True):
    """A rollout in a list. `version` is the number of its events."""

    rollout_id: str
    group_id: str
    state: RolloutState
    version: int
    calls: dict[str, int]
    """Counts by state."""


class ManifestCall(Struct, frozen=True, kw_only=True):
    call_id: str
    parent_call_id: str | None
    state: CallState
    finish_reason: FinishReason | None
    """Of a committed call, like `coords`."""
    failure: CallFailure | None
    """Of a failed call."""
    coords: CallCoords | None


class Manifest(Struct, frozen=True, kw_only=True):
    """`head` ends the hash chain over the rollout's `version` events, so two readings with the same head are the same."""

    rollout_id: str
    group_id: str
    state: RolloutState
    version: int
    head: str
    declared: str | None
    """The call that was declared as the terminal one."""
    calls: tuple[ManifestCall, ...]
    receipt: Receipt
    """As of now; an open rollout's is rejected as not sealed."""


def entry(rollout: Rollout) -> RolloutEntry:
    counts = Counter(call.state.value for call in rollout.calls)
    return RolloutEntry(
        rollout_id=rollout.id,
        group_id=rollout.group_id,
        state=rollout.state,
        version=rollout.version,
        calls=dict(counts),
    )


def manifest(rollout: Rollout) -> Manifest:
    return Manifest(
        rollout_id=rollout.id,
        group_id=rollout.group_id,
        state=rollout.state,
        version=rollout.version,
        head=rollout.head,
        declared=rollout.declared,
        calls=tuple(_call(call) for call in rollout.calls),
        receipt=receipts.build(rollout),
    )


def _call(call: Call) -> ManifestCall:
    return ManifestCall(
        call_id=call.id,
        parent_call_id=None if call.parent is None else call.parent.id,
        state=call.state,
        finish_reason=call.finish_reason if call.state is CallState.COMMITTED else None,
        failure=call.failure,
        coords=call.coords,
    )
