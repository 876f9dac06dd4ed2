"""Where every dispatched rollout is: conservation says that each reaches exactly one end.

    group     dispatched -> committed -> trained,   dispatched | committed -> dropped | evicted | aborted
    held out  dispatched -> evaluated,              dispatched -> aborted

A group ends as one. When it is trained, its verified rollouts count as trained, the rejected ones (placeholders) as dropped
and the aborted ones as aborted; any other end is the end of all of its rollouts. Held-out groups, played for an
evaluation, cannot be trained and are in no count. Ended groups are forgotten: only the counts stay, so memory is bounded by
what is live.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from ledger.errors import IllegalTransition, UnknownGroup
from ledger.events import (
    Compacted,
    GroupAborted,
    GroupCommitted,
    GroupDispatched,
    GroupDropped,
    GroupEnd,
    GroupEvaluated,
    GroupEvent,
    GroupEvicted,
    GroupTrained,
    RolloutReplaced,
)


class Account(Struct, frozen=True, kw_only=True):
    """Counts of rollouts since the run began. `live` are dispatched and not ended."""

    dispatched: int = 0
    trained: int = 0
    evicted: int = 0
    dropped: int = 0
    aborted: int = 0
    live: int = 0

    @property
    def ended(self) -> int:
        return self.trained + self.evicted + self.dropped + self.aborted

    @property
    def lost(self) -> int:
        """Dispatched rollouts that are nowhere."""
        return max(0, self.dispatched - self.ended - self.live)

    @property
    def duplicated(self) -> int:
        """Ends, or live rollouts, that no dispatch explains."""
        return max(0, self.ended + self.live - self.dispatched)


class Stage(StrEnum):
    """How far a live group's rollout is."""

    EXPECTED = "expected"
    RUNNING = "running"
    VERIFIED = "verified"
    REJECTED = "rejected"
    ABORTED = "aborted"
    REPLACED = "replaced"
    """Aborted, and another was dispatched in its place."""

    @property
    def finished(self) -> bool:
        return self not in (Stage.EXPECTED, Stage.RUNNING)


@dataclass(slots=True)
class _Group:
    stages: dict[str, Stage]
    held_out: bool
    committed: bool = False


class Groups:
    """The live groups. An illegal event raises and changes nothing."""

    def __init__(self) -> None:
        self._live: dict[str, _Group] = {}
        self._group_of: dict[str, str] = {}
        self._dispatched = 0
        self.last = ""
        """The group that was dispatched last, also when it has ended; of those that are not held out."""
        self._ends: Counter[type[GroupEnd]] = Counter()

    @property
    def account(self) -> Account:
        ends = self._ends
        return Account(
            dispatched=self._dispatched,
            trained=ends[GroupTrained],
            evicted=ends[GroupEvicted],
            dropped=ends[GroupDropped],
            aborted=ends[GroupAborted],
            live=sum(len(group.stages) for group in self._live.values() if not group.held_out),
        )

    @property
    def live(self) -> list[str]:
        return list(self._live)

    def stage(self, rollout_id: str) -> Stage | None:
        """None when no live group has this rollout."""
        group_id = self._group_of.get(rollout_id)
        return None if group_id is None else self._live[group_id].stages[rollout_id]

    def stages(self, group_id: str) -> dict[str, Stage]:
        """Of the rollouts of a live group."""
        return dict(self._group(group_id).stages)

    def apply(self, event: GroupEvent) -> None:
        """Raises UnknownGroup or IllegalTransition."""
        match event:
            case GroupDispatched():
                self._dispatch(event)
            case RolloutReplaced():
                self._replace(event)
            case GroupCommitted():
                group = self._group(event.group_id)
                _require(group, event, held_out=False)
                _require_finished(group, event)
                if group.committed:
                    raise IllegalTransition(f"group {event.group_id!r}", "committed", "committed")
                group.committed = True
            case GroupTrained():
                self._train(event)
            case GroupEvaluated():
                group = self._group(event.group_id)
                _require(group, event, held_out=True)
                _require_finished(group, event)
                self._end(event.group_id)
            case GroupDropped() | GroupEvicted() | GroupAborted():
                group = self._endable(event)
                if not isinstance(event, GroupAborted):
                    _require(group, event, held_out=False)
                self._end(event.group_id)
                if not group.held_out:
                    self._ends[type(event)] += len(group.stages)

    def compacted(self, event: Compacted) -> None:
        """Begin with the counts of groups that are no longer on record."""
        if self._dispatched:
            raise IllegalTransition("the account", f"of {self._dispatched} rollouts", "begun again")
        ends = {
            GroupTrained: event.trained,
            GroupEvicted: event.evicted,
            GroupDropped: event.dropped,
            GroupAborted: event.aborted,
        }
        self._ends.update(ends)
        self._dispatched = sum(ends.values())
        self.last = event.last_group

    def opened(self, rollout_id: str, group_id: str) -> None:
        """The rollout, dispatched with this group, begins."""
        group = self._group(group_id)
        stage = group.stages.get(rollout_id)
        if stage is not Stage.EXPECTED:
            raise IllegalTransition(
                f"rollout {rollout_id!r} of group {group_id!r}", stage or "not dispatched", "opened"
            )
        group.stages[rollout_id] = Stage.RUNNING

    def finished(self, rollout_id: str, stage: Stage) -> None:
        """A running rollout is verified, rejected or aborted."""
        self._live[self._group_of[rollout_id]].stages[rollout_id] = stage

    def _dispatch(self, event: GroupDispatched) -> None:
        subject = f"group {event.group_id!r}"
        if event.group_id in self._live:
            raise IllegalTransition(subject, "live", "dispatched again")
        if not event.rollout_ids or len(set(event.rollout_ids)) < len(event.rollout_ids):
            raise IllegalTransition(subject, f"of rollouts {event.rollout_ids}", "dispatched (they must be distinct)")
        for rollout_id in event.rollout_ids:
            if rollout_id in self._group_of:
                raise IllegalTransition(f"rollout {rollout_id!r}", "live", f"dispatched again with {subject}")
        self._live[event.group_id] = _Group(dict.fromkeys(event.rollout_ids, Stage.EXPECTED), event.held_out)
        self._group_of.update(dict.fromkeys(event.rollout_ids, event.group_id))
        if not event.held_out:
            self._dispatched += len(event.rollout_ids)
            self.last = event.group_id

    def _replace(self, event: RolloutReplaced) -> None:
        group = self._group(event.group_id)
        stage = group.stages.get(event.rollout_id)
        if stage is not Stage.ABORTED or group.committed:
            state = "of a committed group" if group.committed else stage or f"not of group {event.group_id!r}"
            raise IllegalTransition(f"rollout {event.rollout_id!r}", state, "replaced")
        if event.by in self._group_of:
            raise IllegalTransition(f"rollout {event.by!r}", "live", "dispatched again")
        group.stages |= {event.rollout_id: Stage.REPLACED, event.by: Stage.EXPECTED}
        self._group_of[event.by] = event.group_id
        self._dispatched += not group.held_out

    def _train(self, event: GroupTrained) -> None:
        group = self._endable(event)
        _require(group, event, held_out=False)
        if not group.committed:
            raise IllegalTransition(f"group {event.group_id!r}", "not committed", "trained")
        self._end(event.group_id)
        stages = list(group.stages.values())
        self._ends[GroupTrained] += stages.count(Stage.VERIFIED)
        self._ends[GroupDropped] += stages.count(Stage.REJECTED)
        self._ends[GroupAborted] += stages.count(Stage.ABORTED) + stages.count(Stage.REPLACED)

    def _endable(self, event: GroupEnd) -> _Group:
        group = self._group(event.group_id)
        running = [r for r, stage in group.stages.items() if stage is Stage.RUNNING]
        if running:
            raise IllegalTransition(f"group {event.group_id!r}", f"running ({running})", _step(event))
        return group

    def _group(self, group_id: str) -> _Group:
        try:
            return self._live[group_id]
        except KeyError:
            raise UnknownGroup(group_id) from None

    def _end(self, group_id: str) -> None:
        for rollout_id in self._live.pop(group_id).stages:
            del self._group_of[rollout_id]


def _require(group: _Group, event: GroupEvent, *, held_out: bool) -> None:
    if group.held_out != held_out:
        state = "held out" if group.held_out else "not held out"
        raise IllegalTransition(f"group {event.group_id!r}", state, _step(event))


def _require_finished(group: _Group, event: GroupEvent) -> None:
    unfinished = [r for r, stage in group.stages.items() if not stage.finished]
    if unfinished:
        raise IllegalTransition(f"group {event.group_id!r}", f"unfinished ({unfinished})", _step(event))


def _step(event: GroupEvent) -> str:
    return type(event).__name__.removeprefix("Group").lower()
