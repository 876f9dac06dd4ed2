"""A rollout's story as its events tell it: its calls, its terminal, the verdict and why, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct

from ledger import receipts
from ledger.events import (
    CallAdmitted,
    CallCommitted,
    CallFailed,
    Event,
    GroupAborted,
    GroupCommitted,
    GroupDispatched,
    GroupDropped,
    GroupEnd,
    GroupEvaluated,
    GroupEvicted,
    GroupTrained,
    Lineage,
    RolloutAborted,
    RolloutEvent,
    RolloutFinalized,
    RolloutReplaced,
    RolloutSealed,
    TerminalDeclared,
    TerminalWitnessed,
    Trajectory,
)
from ledger.reasons import Reason
from ledger.records import FinishReason, WeightSpan
from ledger.replay import Replay
from ledger.terminal import Selection


class CallStory(Struct, kw_only=True):
    call_id: str
    lineage: Lineage
    parent_call_id: str | None
    state: Literal["admitted", "committed", "failed", "aborted"] = "admitted"
    """admitted: without an outcome so far. aborted: without one when the rollout was closed."""
    inherited_tokens: int = 0
    prompt_tokens: int = 0
    """New ones."""
    generated_tokens: int = 0
    weight_spans: tuple[WeightSpan, ...] = ()
    finish_reason: FinishReason | None = None
    failure: str | None = None
    detail: str = ""


class Fate(Struct, frozen=True, kw_only=True):
    """What became of a rollout's tokens."""

    end: Literal["live", "trained", "evaluated", "dropped", "evicted", "aborted"]
    step: int | None = None
    """The optimizer step that its group was trained in, counted from 1; of an evaluation, the steps done before it."""
    detail: str = ""
    undone_by_resume: int | None = None
    """The run was resumed from the checkpoint of this many steps, which does not have that step."""


class RolloutStory(Struct, kw_only=True):
    rollout_id: str
    group_id: str
    prompt_id: str
    dispatch_version: int
    """Weight version served when its group was dispatched."""
    state: Literal["expected", "open", "sealed", "verified", "rejected", "aborted"] = "expected"
    calls: list[CallStory] = []
    trajectory: Trajectory | None = None
    """What of it is to be trained."""
    declared: str | None = None
    witnessed: dict[str, tuple[str, ...]] = {}
    """The calls that fit what the environment knows of the answer that it scored, by how it knows it."""
    terminal: str | None = None
    selection: Selection | None = None
    chain: list[str] = []
    """Ids of the calls that make up the terminal conversation, and how many tokens that has."""
    chain_tokens: int = 0
    branches: list[list[str]] = []
    """Other conversations that are to be trained, likewise."""
    reason: Reason | None = None
    """Of a rejection, its meaning, and what it found."""
    meaning: str = ""
    detail: str = ""
    events: int = 0
    """Number of the rollout's events, and their hash chain's head."""
    head: str = ""
    fate: Fate = Fate(end="live")
    replaced_by: str | None = None
    """The rollout that was played in its place."""

    @property
    def generated_tokens(self) -> int:
        return sum(call.generated_tokens for call in self.calls)


def tell(events: Iterable[Event], *, resumed: Sequence[tuple[int, int]]) -> Iterator[RolloutStory]:
    """The stories of all rollouts, as their groups end; those of live groups in the end. Memory: the live groups.

    `resumed`: the numbers (from 0) of those events that are a `RunResumed`, each with its step. Raises a LedgerError at an
    event that contradicts those before it.
    """
    replay = Replay()
    for number, event in enumerate(events):
        ended = replay.take(event)
        if ended:
            later = [step for at, step in resumed if at > number]
            yield from _stories(ended, later)
    for group in replay.live():
        yield from _stories(group, ())


def _stories(group: Sequence[Event], resumed: Sequence[int]) -> Iterator[RolloutStory]:
    dispatched, *rest = group
    assert isinstance(dispatched, GroupDispatched)
    end = rest[-1] if rest and isinstance(rest[-1], GroupEnd) else None
    undone = next((s for s in resumed if isinstance(end, GroupTrained) and end.step >= s), None)
    committed = any(isinstance(event, GroupCommitted) for event in rest)
    replaced = {event.rollout_id: event.by for event in rest if isinstance(event, RolloutReplaced)}
    for rollout_id in (*dispatched.rollout_ids, *replaced.values()):
        events = [event for event in rest if isinstance(event, RolloutEvent) and event.rollout_id == rollout_id]
        story = _story(dispatched, rollout_id, events)
        story.fate = _fate(story.state, story.reason or "", committed, end, undone)
        story.replaced_by = replaced.get(rollout_id)
        yield story


def _story(group: GroupDispatched, rollout_id: str, events: Sequence[RolloutEvent]) -> RolloutStory:
    story = RolloutStory(
        rollout_id=rollout_id,
        group_id=group.group_id,
        prompt_id=group.prompt_id,
        dispatch_version=group.version,
        events=len(events),
    )
    if not events:
        return story
    receipt = receipts.rebuild(events)
    story.state, story.trajectory = "open", receipt.trajectory
    story.terminal, story.selection, story.head = receipt.terminal, receipt.selection, receipt.head
    story.chain = [link.call_id for link in receipt.chain]
    story.branches = [[link.call_id for link in chain] for chain in receipt.branches]
    story.chain_tokens = receipt.chain[-1].end if receipt.chain else 0
    calls: dict[str, CallStory] = {}
    for event in events:
        _add(story, calls, event)
    story.calls = list(calls.values())
    return story


def _add(story: RolloutStory, calls: dict[str, CallStory], event: RolloutEvent) -> None:
    match event:
        case CallAdmitted():
            calls[event.call_id] = CallStory(
                call_id=event.call_id, lineage=event.lineage, parent_call_id=event.parent_call_id
            )
        case CallCommitted():
            coords, call = event.coords, calls[event.coords.call_id]
            call.state, call.finish_reason, call.weight_spans = "committed", event.finish_reason, coords.weight_spans
            call.inherited_tokens, call.prompt_tokens = coords.prev_len, coords.carry_len
            call.generated_tokens = coords.delta_len - coords.carry_len
        case CallFailed():
            call = calls[event.call_id]
            call.state, call.failure, call.detail = "failed", event.reason, event.detail
        case TerminalDeclared():
            story.declared = event.call_id
        case TerminalWitnessed():
            story.witnessed = {**story.witnessed, event.by: event.calls}
        case RolloutSealed():
            story.state = "sealed"
            _close(calls)
        case RolloutFinalized():
            story.state = "verified" if event.reason is None else "rejected"
            story.reason, story.detail = event.reason, event.detail
            story.meaning = "" if event.reason is None else event.reason.meaning
        case RolloutAborted():
            story.state, story.reason, story.detail = "aborted", Reason.ABORTED, event.reason
            story.meaning = Reason.ABORTED.meaning
            _close(calls)
        case _:
            pass


def _close(calls: dict[str, CallStory]) -> None:
    for call in calls.values():
        if call.state == "admitted":
            call.state = "aborted"


def _fate(state: str, detail: str, committed: bool, end: GroupEnd | None, undone: int | None) -> Fate:
    match end:
        case None:
            return Fate(
                end="live", detail="its group is ready to be trained" if committed else "its group is not finished"
            )
        case GroupTrained():
            if state == "verified":
                return Fate(end="trained", step=end.step + 1, undone_by_resume=undone)
            return Fate(
                end="dropped" if state == "rejected" else "aborted",
                step=end.step + 1,
                detail=detail,
                undone_by_resume=undone,
            )
        case GroupEvaluated():
            return Fate(end="evaluated", step=end.step)
        case GroupDropped():
            return Fate(end="dropped", detail=end.reason)
        case GroupEvicted():
            return Fate(end="evicted", detail=end.reason)
        case GroupAborted():
            return Fate(end="aborted", detail=end.reason)
