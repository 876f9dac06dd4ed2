"""One rollout's record: a state machine that only its events change, with the hash chain over them.

rollout   open -> sealed -> finalized,   open | sealed -> aborted
call      admitted -> committed | failed,   admitted -> aborted when the rollout is sealed or aborted
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from ledger import ids
from ledger.errors import BrokenChain, IllegalTransition, RolloutClosed, UnknownCall
from ledger.events import (
    GENESIS,
    CallAdmitted,
    CallCommitted,
    CallFailed,
    Lineage,
    RolloutAborted,
    RolloutEvent,
    RolloutFinalized,
    RolloutOpened,
    RolloutSealed,
    TerminalDeclared,
    TerminalWitnessed,
    Trajectory,
    next_head,
)
from ledger.lineage import Fingerprint, extend
from ledger.reasons import CallFailure, Reason
from ledger.records import CallCoords, FinishReason, Message, ParentCoords


class RolloutState(StrEnum):
    OPEN = "open"
    SEALED = "sealed"
    FINALIZED = "finalized"
    ABORTED = "aborted"


class CallState(StrEnum):
    ADMITTED = "admitted"
    COMMITTED = "committed"
    FAILED = "failed"
    ABORTED = "aborted"


class Call(Struct, kw_only=True, gc=False):
    # Out of the collector's sight, with all that it holds: there is no cycle in it, and a pass over the calls of all open
    # rollouts would hold the loop for tens of milliseconds.
    id: str
    seq: int
    parent: Call | None
    request: str
    messages: int
    state: CallState = CallState.ADMITTED
    coords: CallCoords | None = None
    """Set when committed, like `finish_reason`."""
    finish_reason: FinishReason = "stop"
    failure: CallFailure | None = None
    """Set when failed."""

    def path(self) -> list[Call]:
        """The calls from the root to this one."""
        path: list[Call] = []
        call: Call | None = self
        while call is not None:
            path.append(call)
            call = call.parent
        path.reverse()
        return path

    @property
    def committed(self) -> CallCoords:
        """The coordinates of a committed call."""
        if self.coords is None:
            raise IllegalTransition(f"call {self.id!r}", self.state, "asked for coordinates")
        return self.coords


class Rollout:
    """Apply events in order; an illegal one raises and changes nothing."""

    def __init__(self, opened: RolloutOpened) -> None:
        self.id = opened.rollout_id
        self.group_id = opened.group_id
        self.trajectory: Trajectory = opened.trajectory
        self.state = RolloutState.OPEN
        self.calls: list[Call] = []
        self.declared: str | None = None
        self.witnesses: dict[str, tuple[str, ...]] = {}
        """Committed calls that fit what is known of the scored answer, by how it is known."""
        self.failure: Reason | None = None
        self.abort_reason = ""
        self.version = 1
        """Number of events."""
        self._head = next_head(GENESIS, opened)
        self._by_id: dict[str, Call] = {}
        self._by_conversation: dict[str, tuple[Call, ...]] = {}

    @property
    def head(self) -> str:
        return self._head.hex()

    def call(self, call_id: str) -> Call:
        """Raises UnknownCall."""
        call = self.find(call_id)
        if call is None:
            raise UnknownCall(call_id)
        return call

    def find(self, call_id: str) -> Call | None:
        return self._by_id.get(call_id)

    def answered_with(self, content: str) -> list[Call]:
        """The committed calls whose answer was just this text."""
        answer = Message(role="assistant", content=content)
        return [
            call
            for call in self.calls
            if call.state is CallState.COMMITTED
            and any(call is found for found in self._by_conversation.get(extend(call.request, answer), ()))
        ]

    def locate(self, fingerprint: Fingerprint) -> tuple[Lineage, Call | None]:
        """The place of a new call with this fingerprint, and its parent when it continues one.

        Retried calls with equal tokens count as one; the first stands for them.
        """
        if fingerprint.history is None:
            return Lineage.ROOT, None
        if fingerprint.history_messages == fingerprint.messages:
            return Lineage.FORK, None  # It ends in an assistant message: there is no next turn to bridge to.
        candidates = self._by_conversation.get(fingerprint.history, ())
        if not candidates:
            return Lineage.FORK, None
        if len({call.committed.cumulative_hash for call in candidates}) > 1:
            return Lineage.AMBIGUOUS, None
        return Lineage.CONTINUED, candidates[0]

    def apply(self, event: RolloutEvent) -> None:
        """Raises RolloutClosed, UnknownCall, IllegalTransition or BrokenChain."""
        head = next_head(self._head, event)
        match event:
            case RolloutOpened():
                raise IllegalTransition(f"rollout {self.id!r}", self.state, "opened again")
            case CallAdmitted():
                self._admit(event)
            case CallCommitted():
                self._commit(event)
            case CallFailed():
                self._fail(event)
            case TerminalDeclared():
                self._require_open()
                self.declared = event.call_id
            case TerminalWitnessed():
                self._require_open()
                for call_id in event.calls:
                    if self.call(call_id).state is not CallState.COMMITTED:
                        raise IllegalTransition(f"call {call_id!r}", self.call(call_id).state, "witnessed")
                self.witnesses[event.by] = event.calls
            case RolloutSealed():
                self._require(RolloutState.OPEN, step="sealed")
                self._check_head(event.head)
                self.failure = event.failure
                self._close(RolloutState.SEALED)
            case RolloutFinalized():
                self._require(RolloutState.SEALED, step="finalized")
                self._check_head(event.head)
                self._close(RolloutState.FINALIZED)
            case RolloutAborted():
                self._require(RolloutState.OPEN, RolloutState.SEALED, step="aborted")
                self._check_head(event.head)
                self.abort_reason = event.reason
                self._close(RolloutState.ABORTED)
        self.version += 1
        self._head = head

    def _admit(self, event: CallAdmitted) -> None:
        self._require_open()
        if self.trajectory == "echo":
            raise IllegalTransition(
                f"rollout {self.id!r}",
                "played without token capture (token_capture.enabled is false)",
                "given a model call",
            )
        seq = len(self.calls)
        if event.call_id != ids.call_id(self.id, seq):
            raise IllegalTransition(f"call {event.call_id!r}", f"not the next of rollout {self.id!r}", "admitted")
        parent = None
        if event.parent_call_id is not None:
            parent = self.call(event.parent_call_id)
            if parent.state is not CallState.COMMITTED:
                raise IllegalTransition(f"call {parent.id!r}", parent.state, "continued")
        call = Call(id=event.call_id, seq=seq, parent=parent, request=event.request, messages=event.messages)
        self.calls.append(call)
        self._by_id[call.id] = call

    def _commit(self, event: CallCommitted) -> None:
        call = self._admitted(event.coords.call_id, "committed")
        expected = None if call.parent is None else call.parent.id
        if event.coords.parent_call_id != expected:
            raise IllegalTransition(
                f"call {call.id!r}", f"admitted as a continuation of {expected!r}", "committed under another parent"
            )
        call.state = CallState.COMMITTED
        call.coords = event.coords
        call.finish_reason = event.finish_reason
        self._by_conversation[event.conversation] = (*self._by_conversation.get(event.conversation, ()), call)

    def _fail(self, event: CallFailed) -> None:
        call = self._admitted(event.call_id, "failed")
        call.state = CallState.FAILED
        call.failure = event.reason

    def _admitted(self, call_id: str, step: str) -> Call:
        self._require_open()
        call = self.call(call_id)
        if call.state is not CallState.ADMITTED:
            raise IllegalTransition(f"call {call_id!r}", call.state, step)
        return call

    def _close(self, state: RolloutState) -> None:
        self.state = state
        for call in self.calls:
            if call.state is CallState.ADMITTED:
                call.state = CallState.ABORTED

    def _check_head(self, recorded: str) -> None:
        if recorded != self.head:
            raise BrokenChain(self.id, self.version, self.head, recorded)

    def _require_open(self) -> None:
        if self.state is not RolloutState.OPEN:
            raise RolloutClosed(self.id, self.state)

    def _require(self, *states: RolloutState, step: str) -> None:
        if self.state not in states:
            raise IllegalTransition(f"rollout {self.id!r}", self.state, step)


def parent_coords(parent: Call) -> ParentCoords:
    """What a worker must know to continue `parent`."""
    coords = parent.committed
    return ParentCoords(
        call_id=parent.id,
        staging_keys=tuple(call.committed.staging_key for call in parent.path()),
        cum_len=coords.cum_len,
        chain_hash=coords.chain_hash,
        cumulative_hash=coords.cumulative_hash,
        messages=parent.messages + 1,
    )
