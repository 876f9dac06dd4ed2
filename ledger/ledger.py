"""The ledger: records every step of every rollout and group, and refuses each that its state machines do not have.

Each verb changes the state and takes the event's place in the log in one go, without a suspension between, and then waits
until the event is durable. So state and log agree in order, and a cancellation ends the waiting, never the event.

Memory is bounded by what is live: a finished rollout's record and an ended group are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain

import anyio
import anyio.lowlevel
from msgspec import Struct
from msgspec.structs import replace

from ledger import ids, receipts
from ledger.account import Account, Groups, Stage
from ledger.errors import IllegalTransition, JournalFailed, RolloutClosed, UnknownRollout
from ledger.events import (
    CallAdmitted,
    CallCommitted,
    CallFailed,
    CheckpointMarked,
    Compacted,
    Event,
    EventLog,
    GroupAborted,
    GroupCommitted,
    GroupDispatched,
    GroupDropped,
    GroupEvaluated,
    GroupEvicted,
    GroupTrained,
    Lineage,
    RolloutAborted,
    RolloutFinalized,
    RolloutOpened,
    RolloutReplaced,
    RolloutSealed,
    RunResumed,
    TerminalDeclared,
    TerminalWitnessed,
    Trajectory,
)
from ledger.lineage import Fingerprint, extend
from ledger.manifest import Manifest, RolloutEntry, entry, manifest
from ledger.reasons import CallFailure, Reason, Rejection
from ledger.receipts import Receipt
from ledger.records import CallReply, ParentCoords
from ledger.rollout import Rollout, RolloutState, parent_coords

MAX_TEXT = 2000
"""Characters of a foreign text (an error, a declaration) that an event keeps."""


class Admission(Struct, frozen=True, kw_only=True):
    """The place of a new call: its id, and the call it continues."""

    call_id: str
    parent: ParentCoords | None
    lineage: Lineage


class Ledger:
    """`trajectory` is what is trained of the rollouts that are opened. `settle_timeout_s` bounds the wait for the durability
    of a failure that is recorded while being cancelled."""

    def __init__(self, log: EventLog, *, trajectory: Trajectory = "terminal", settle_timeout_s: float = 5.0) -> None:
        self._log = log
        self._trajectory: Trajectory = trajectory
        self._settle_timeout_s = settle_timeout_s
        self._rollouts: dict[str, Rollout] = {}
        self._groups = Groups()

    def restore(self, events: Iterable[Event]) -> None:
        """Bring the state to where `events`, read back from a log, ended. Nothing is appended."""
        for event in events:
            self._apply(event)

    @property
    def account(self) -> Account:
        return self._groups.account

    @property
    def last_group(self) -> str:
        """The group that was dispatched last, also when it has ended; held-out ones aside. "" before the first."""
        return self._groups.last

    def call_count(self, rollout_id: str) -> int:
        """How many calls the open or sealed rollout has made."""
        return len(self._rollout(rollout_id).calls)

    def generated(self, rollout_id: str) -> int:
        """Tokens that the answered calls of the open or sealed rollout generated."""
        calls = (call.coords for call in self._rollout(rollout_id).calls)
        return sum(span.end - span.start for coords in calls if coords is not None for span in coords.weight_spans)

    def stages(self, group_id: str) -> dict[str, Stage]:
        """Where each rollout of a live group is, those that were played in place of others too."""
        return self._groups.stages(group_id)

    def entries(self) -> list[RolloutEntry]:
        """The open and sealed rollouts."""
        return [entry(rollout) for rollout in self._rollouts.values()]

    def manifest(self, rollout_id: str) -> Manifest:
        """The record of an open or sealed rollout as of now."""
        return manifest(self._rollout(rollout_id))

    def receipt(self, rollout_id: str) -> Receipt:
        """The receipt of an open or sealed rollout as of now; an open one's is rejected as not sealed."""
        return receipts.build(self._rollout(rollout_id))

    async def open(self, rollout_id: str, group_id: str) -> None:
        """Begin a rollout that was dispatched with the group, once."""
        ids.check_rollout_id(rollout_id)
        await self._record(RolloutOpened(rollout_id=rollout_id, group_id=group_id, trajectory=self._trajectory))

    async def declare_terminal(self, rollout_id: str, call_id: str) -> None:
        """Name the call whose conversation is to be trained; the last declaration counts. It need not be settled yet."""
        await self._record(TerminalDeclared(rollout_id=rollout_id, call_id=_text(call_id)))

    async def witness(self, rollout_id: str, *, response_id: str | None = None, content: str | None = None) -> None:
        """Say which answer was scored, by its response id (or call id) or by its text; a declaration counts for more.

        What fits no answer, or answers of different conversations, says nothing.
        """
        rollout = self._rollout(rollout_id)
        if response_id is not None:
            call = rollout.find(ids.call_of(response_id))
            named = () if call is None or call.coords is None else (call.id,)
            await self._record(TerminalWitnessed(rollout_id=rollout_id, by="response_id", calls=named))
        if content is not None:
            named = tuple(call.id for call in rollout.answered_with(content))
            await self._record(TerminalWitnessed(rollout_id=rollout_id, by="content", calls=named))

    async def seal(self, rollout_id: str, failure: Reason | None = None) -> Receipt:
        """Close the record and testify to it. Later calls are refused; one that is still admitted rejects the rollout.

        `failure` rejects it too, for a reason that the calls do not show.
        """
        event = RolloutSealed(rollout_id=rollout_id, failure=failure, head=self._rollout(rollout_id).head)
        self._apply(event)
        receipt = self.receipt(rollout_id)
        await self._log.append(event)
        return receipt

    async def seal_once(self, rollout_id: str, failure: Reason | None = None) -> Receipt:
        """`seal`, for a rollout that may have been sealed over the control plane; `failure` rejects that one too."""
        if self._rollout(rollout_id).state is not RolloutState.SEALED:
            return await self.seal(rollout_id, failure)
        receipt = self.receipt(rollout_id)
        if failure is None:
            return receipt
        return replace(receipt, rejections=(Rejection(failure, failure.meaning), *receipt.rejections))

    async def finalize(self, rollout_id: str, reason: Reason | None, detail: str = "") -> None:
        """End a sealed rollout: verified (`reason` None), or rejected. Its record is forgotten.

        With trajectory `echo`, `reason` None says that the environment's tokens were published, which nothing proves.
        """
        rollout = self._rollout(rollout_id)
        if reason is None and receipts.build(rollout).rejections:
            raise IllegalTransition(f"rollout {rollout_id!r}", f"{rollout.state} and rejected", "finalized as verified")
        await self._record(
            RolloutFinalized(rollout_id=rollout_id, reason=reason, detail=_text(detail), head=rollout.head)
        )

    async def abort(self, rollout_id: str, reason: str) -> Receipt:
        """End an open or sealed rollout untrained. Its record is forgotten.

        The receipt says what was staged for the rollout. A cancellation loses it, so shield this where that matters.
        """
        rollout = self._rollout(rollout_id)
        event = RolloutAborted(rollout_id=rollout_id, reason=_text(reason), head=rollout.head)
        self._apply(event)
        receipt = receipts.build(rollout)
        await self._log.append(event)
        return receipt

    async def admit(self, rollout_id: str, fingerprint: Fingerprint) -> Admission:
        """Take a call in, before it is generated. Whoever gets the admission must commit or fail it.

        A cancellation leaves the call failed, since nobody learns its id.
        """
        rollout = self._rollout(rollout_id)
        lineage, parent = rollout.locate(fingerprint)
        call_id = ids.call_id(rollout_id, len(rollout.calls))
        event = CallAdmitted(
            rollout_id=rollout_id,
            call_id=call_id,
            parent_call_id=None if parent is None else parent.id,
            lineage=lineage,
            request=fingerprint.request,
            messages=fingerprint.messages,
        )
        self._apply(event)
        try:
            await self._log.append(event)
        except anyio.get_cancelled_exc_class():
            await self.settle(call_id, CallFailure.CANCELLED, "cancelled during admission")
            raise
        return Admission(call_id=call_id, parent=None if parent is None else parent_coords(parent), lineage=lineage)

    async def commit(self, reply: CallReply) -> None:
        """The call's tokens are staged where `reply.coords` says. Only once this returns may the agent get the answer."""
        call_id = reply.coords.call_id
        rollout = self._rollout(ids.rollout_of(call_id))
        await self._record(
            CallCommitted(
                rollout_id=rollout.id,
                coords=reply.coords,
                finish_reason=reply.finish_reason,
                conversation=extend(rollout.call(call_id).request, reply.message),
            )
        )

    async def fail(self, call_id: str, reason: CallFailure, detail: str) -> None:
        """The call gets no answer."""
        await self._record(
            CallFailed(rollout_id=ids.rollout_of(call_id), call_id=call_id, reason=reason, detail=_text(detail))
        )

    async def settle(self, call_id: str, reason: CallFailure, detail: str) -> None:
        """`fail`, to be used in clean-up: shielded and bounded.

        A rollout that was closed meanwhile has the call on record as unsettled; then this does nothing.
        """
        with anyio.move_on_after(self._settle_timeout_s, shield=True):
            with suppress(RolloutClosed, UnknownRollout):
                await self.fail(call_id, reason, detail)

    async def dispatched(
        self, group_id: str, prompt_id: str, rollout_ids: Sequence[str], version: int, *, held_out: bool = False
    ) -> None:
        """A prompt group is about to be played, its rollouts starting under weight `version`.

        A `held_out` one is for an evaluation: it is in no account, and can be evaluated or aborted, nothing else.
        """
        for rollout_id in rollout_ids:
            ids.check_rollout_id(rollout_id)
        await self._record(
            GroupDispatched(
                group_id=group_id,
                prompt_id=prompt_id,
                rollout_ids=tuple(rollout_ids),
                version=version,
                held_out=held_out,
            )
        )

    async def replaced(self, group_id: str, rollout_id: str, by: str) -> None:
        """The group's rollout, which was aborted, is to be played again, as rollout `by`; once for each rollout.

        Raises IllegalTransition for a rollout that is not aborted, or a new id that is in use.
        """
        ids.check_rollout_id(by)
        await self._record(RolloutReplaced(group_id=group_id, rollout_id=rollout_id, by=by))

    async def committed(self, group_id: str) -> None:
        """The group is ready: all of its rollouts are finished, the rows of the verified ones published."""
        await self._record(GroupCommitted(group_id=group_id))

    async def trained(self, group_id: str, step: int) -> None:
        """A committed group was trained in optimizer step `step`: its end."""
        await self._record(GroupTrained(group_id=group_id, step=step))

    async def evaluated(self, group_id: str, step: int) -> None:
        """A held-out group's rewards are known, after `step` optimizer steps: its end. All its rollouts are finished."""
        await self._record(GroupEvaluated(group_id=group_id, step=step))

    async def dropped(self, group_id: str, reason: str) -> None:
        """The group cannot be trained: its end. No rollout of it may be running."""
        await self._record(GroupDropped(group_id=group_id, reason=_text(reason)))

    async def evicted(self, group_id: str, reason: str = "stale") -> None:
        """The group grew too stale: its end. No rollout of it may be running."""
        await self._record(GroupEvicted(group_id=group_id, reason=_text(reason)))

    async def aborted(self, group_id: str, reason: str) -> None:
        """The group is given up: its end. No rollout of it may be running."""
        await self._record(GroupAborted(group_id=group_id, reason=_text(reason)))

    async def checkpointed(self, step: int) -> None:
        """The checkpoint of `step` holds the state up to here."""
        await self._record(CheckpointMarked(step=step))

    async def resumed(self, step: int) -> None:
        """The run goes on from the checkpoint of `step`. What is live is given up: its prompts are played anew."""
        await self.give_up(f"the run was resumed from step {step}")
        await self._record(RunResumed(step=step))

    async def give_up(self, reason: str) -> None:
        """End every live rollout and group as aborted, also when the record of it fails: JournalFailed is raised after that.
        To be called when nothing plays them any more.

        A cancellation leaves some of them live.
        """
        failures: list[JournalFailed] = []

        async def put_down(event: Event) -> None:
            try:
                await self._log.append(event)
            except JournalFailed as failure:
                failures.append(failure)

        reason = _text(reason)
        rollouts = (
            RolloutAborted(rollout_id=rollout_id, reason=reason, head=self._rollouts[rollout_id].head)
            for rollout_id in tuple(self._rollouts)
        )
        groups = (GroupAborted(group_id=group_id, reason=reason) for group_id in tuple(self._groups.live))
        async with anyio.create_task_group() as tg:
            for event in chain(rollouts, groups):
                self._apply(event)
                tg.start_soon(put_down, event)
                # There may be thousands: each has a turn of the loop.
                await anyio.lowlevel.checkpoint()
        if failures:
            raise failures[0]

    async def _record(self, event: Event) -> None:
        self._apply(event)
        await self._log.append(event)

    def _apply(self, event: Event) -> None:
        match event:
            case RolloutOpened():
                self._groups.opened(event.rollout_id, event.group_id)
                self._rollouts[event.rollout_id] = Rollout(event)
            case (
                CallAdmitted()
                | CallCommitted()
                | CallFailed()
                | TerminalDeclared()
                | TerminalWitnessed()
                | RolloutSealed()
            ):
                self._rollout(event.rollout_id).apply(event)
            case RolloutFinalized() | RolloutAborted():
                self._rollout(event.rollout_id).apply(event)
                del self._rollouts[event.rollout_id]
                self._groups.finished(event.rollout_id, _stage(event))
            case Compacted():
                self._groups.compacted(event)
            case CheckpointMarked() | RunResumed():
                pass
            case _:
                self._groups.apply(event)

    def _rollout(self, rollout_id: str) -> Rollout:
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            stage = self._groups.stage(rollout_id)
            if stage is not None and stage.finished:
                raise RolloutClosed(rollout_id, stage)
            raise UnknownRollout(rollout_id)
        return rollout


def _stage(event: RolloutFinalized | RolloutAborted) -> Stage:
    if isinstance(event, RolloutAborted):
        return Stage.ABORTED
    return Stage.VERIFIED if event.reason is None else Stage.REJECTED


def _text(text: str) -> str:
    # A lone surrogate, which an error's text may hold, has no UTF-8.
    return text[:MAX_TEXT].encode(errors="replace").decode()
