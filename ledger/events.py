"""Everything the ledger can record, as typed events with one canonical byte form, and the hash chain over a rollout's.

A rollout's events form a chain, `head = sha256(head || event bytes)`, and those that close it carry the head before them, so
that a dropped, reordered or edited event shows.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from typing import Literal, Protocol

import anyio.lowlevel
import msgspec
from msgspec import Struct

from ledger.reasons import CallFailure, Reason
from ledger.records import CallCoords, FinishReason

GENESIS = bytes(32)
"""The head of a rollout without events."""


class Lineage(StrEnum):
    """How a call's place in the conversation was found."""

    ROOT = "root"
    """It brings no assistant history."""
    CONTINUED = "continued"
    """Its history is exactly that of one committed call (or of several with equal tokens)."""
    FORK = "fork"
    """Its history is no committed call's (edited, compacted, seeded): a new root."""
    AMBIGUOUS = "ambiguous"
    """Its history is that of several committed calls with different tokens: a new root."""


Trajectory = Literal["terminal", "branches", "echo"]
"""What is trained of a rollout: its terminal conversation, all its conversations, or tokens that the environment returns."""


class _Event(Struct, frozen=True, forbid_unknown_fields=True, tag_field="event", tag=True):
    pass


class RolloutOpened(_Event, frozen=True, kw_only=True):
    rollout_id: str
    group_id: str
    trajectory: Trajectory = "terminal"


class CallAdmitted(_Event, frozen=True, kw_only=True):
    """Written before generation, so that a call which is then lost still shows."""

    rollout_id: str
    call_id: str
    parent_call_id: str | None
    lineage: Lineage
    request: str
    """Fingerprint of the request's messages and tools."""
    messages: int


class CallCommitted(_Event, frozen=True, kw_only=True):
    """The call's tokens are staged; only after this is durable does the agent get the answer."""

    rollout_id: str
    coords: CallCoords
    finish_reason: FinishReason
    conversation: str
    """Fingerprint of the request and the answer: what a continuation must begin with."""


class CallFailed(_Event, frozen=True, kw_only=True):
    rollout_id: str
    call_id: str
    reason: CallFailure
    detail: str


class TerminalDeclared(_Event, frozen=True, kw_only=True):
    rollout_id: str
    call_id: str
    """As the environment gave it; it need not exist."""


class TerminalWitnessed(_Event, frozen=True, kw_only=True):
    """What the environment knows of the answer that it scored, as the committed calls that fit."""

    rollout_id: str
    by: Literal["response_id", "content"]
    calls: tuple[str, ...]


class RolloutSealed(_Event, frozen=True, kw_only=True):
    """No call event follows; a call that is still admitted counts as aborted."""

    rollout_id: str
    failure: Reason | None
    """Why the controller holds the rollout to be failed, whatever its calls say."""
    head: str
    """Of the events before, in hex."""


class RolloutFinalized(_Event, frozen=True, kw_only=True):
    rollout_id: str
    reason: Reason | None
    """None: verified, its row is published."""
    detail: str
    head: str
    """Of the events before, in hex."""


class RolloutAborted(_Event, frozen=True, kw_only=True):
    rollout_id: str
    reason: str
    head: str
    """Of the events before, in hex."""


class GroupDispatched(_Event, frozen=True, kw_only=True):
    group_id: str
    prompt_id: str
    rollout_ids: tuple[str, ...]
    version: int
    """Weight version served at dispatch."""
    held_out: bool = False
    """Played for an evaluation. Such a group is never committed or trained, and counts in no account."""


class RolloutReplaced(_Event, frozen=True, kw_only=True):
    """A rollout of the group was lost, through no fault of its own, and aborted; another one is dispatched in its place."""

    group_id: str
    rollout_id: str
    by: str
    """The new rollout's id."""


class GroupCommitted(_Event, frozen=True, kw_only=True):
    """All rollouts are finished and the verified rows published: the group is ready for training."""

    group_id: str


class GroupTrained(_Event, frozen=True, kw_only=True):
    group_id: str
    step: int


class GroupEvaluated(_Event, frozen=True, kw_only=True):
    """The end of a held-out group: its rewards went into the evaluation after `step` optimizer steps."""

    group_id: str
    step: int


class GroupDropped(_Event, frozen=True, kw_only=True):
    group_id: str
    reason: str


class GroupEvicted(_Event, frozen=True, kw_only=True):
    group_id: str
    reason: str


class GroupAborted(_Event, frozen=True, kw_only=True):
    group_id: str
    reason: str


class CheckpointMarked(_Event, frozen=True, kw_only=True):
    """The state up to here is in the checkpoint of `step`."""

    step: int


class RunResumed(_Event, frozen=True, kw_only=True):
    """A new process goes on from the checkpoint of `step`: what was trained in that step or later is undone."""

    step: int


class Compacted(_Event, frozen=True, kw_only=True):
    """Stands at a log's beginning, for older events that were removed: how many rollouts their ended groups had, by end.

    What was recorded of groups that had not ended by then follows it.
    """

    trained: int
    evicted: int
    dropped: int
    aborted: int
    last_group: str
    """The group that was dispatched last."""


CallEvent = CallAdmitted | CallCommitted | CallFailed
RolloutEvent = (
    RolloutOpened | CallEvent | TerminalDeclared | TerminalWitnessed | RolloutSealed | RolloutFinalized | RolloutAborted
)
GroupEnd = GroupTrained | GroupEvaluated | GroupDropped | GroupEvicted | GroupAborted
GroupEvent = GroupDispatched | RolloutReplaced | GroupCommitted | GroupEnd
Event = RolloutEvent | GroupEvent | CheckpointMarked | RunResumed | Compacted

# Deterministic: fields are written in the order of the struct, and no event holds a dict or a set.
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(event: Event) -> bytes:
    """The event's canonical msgpack bytes."""
    return _encoder.encode(event)


def decode(data: bytes) -> Event:
    """Inverse of `encode`; raises `msgspec.DecodeError` (`ValidationError` included) on anything else."""
    return _decoder.decode(data)


def next_head(head: bytes, event: RolloutEvent) -> bytes:
    """The rollout's head after `event`."""
    return hashlib.sha256(head + encode(event)).digest()


def head_of(events: Iterable[RolloutEvent]) -> str:
    """The head, in hex, of a rollout with these events."""
    head = GENESIS
    for event in events:
        head = next_head(head, event)
    return head.hex()


class EventLog(Protocol):
    """Where events go. One ledger writes to it."""

    async def append(self, event: Event) -> None:
        """Return when `event` is durable.

        The event takes its place in the log before the first suspension, so the log's order is the order of the calls. A
        cancellation ends the waiting only: the event stays. Once an append has raised, all later ones must raise too: what
        is in memory may then be ahead of the log, and the run has to end.
        """
        ...


class MemoryLog:
    """Keeps the newest `limit` events in memory. It survives nothing; use it where a crash ends the run anyway."""

    def __init__(self, limit: int = 65_536) -> None:
        self.events: deque[Event] = deque(maxlen=limit)

    async def append(self, event: Event) -> None:
        self.events.append(event)
        await anyio.lowlevel.checkpoint()
