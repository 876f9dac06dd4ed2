"""Staleness policies: which groups may be dispatched, which train together, which have grown too old.

A sampler is a pure function of a `BufferView`; it holds no state, so what it decides can be replayed and tested.

Staleness is counted in optimizer steps: a group that began under weight version v and trains at step s (0-based) is
s - v steps stale, because version s is what step s starts from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from controller.buffer import GroupEntry, GroupState


@dataclass(frozen=True)
class BufferView:
    """What a sampler sees."""

    step: int
    """The step being trained, or the next one (0-based)."""
    version: int
    """The weight version that a dispatch would begin under now."""
    last_step: int
    """Steps [0, last_step) are to be trained."""
    entries: Sequence[GroupEntry]
    exhausted: bool = False
    """No further prompt will come."""


class Sampler(Protocol):
    groups_per_step: int

    def required_capacity(self) -> int:
        """Live groups that the buffer must hold for the policy not to block itself."""
        ...

    def admit(self, view: BufferView) -> int | None:
        """The step that a group dispatched now would train at; None when it must not be dispatched now."""
        ...

    def select(self, view: BufferView) -> list[str] | None:
        """The groups of step `view.step`, or None while they are not all ready."""
        ...

    def evict(self, view: BufferView) -> list[str]:
        """Ready groups that no step can use any more."""
        ...


class Windowed:
    """Any ready groups within the age window, oldest first.

    With `over_sampling` 1 a step waits for groups that would otherwise grow too old, so none is lost for being slow. With
    more, surplus groups are dispatched, a step takes the first that are ready, and what grows too old is evicted.
    """

    def __init__(self, groups_per_step: int, max_staleness: int, over_sampling: float = 1.0) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.over_sampling = over_sampling
        self._surplus = math.ceil(groups_per_step * (max_staleness + 1) * over_sampling) - groups_per_step * (
            max_staleness + 1
        )

    def required_capacity(self) -> int:
        return self.groups_per_step * (self.max_staleness + 1) + self._surplus

    def admit(self, view: BufferView) -> int | None:
        ahead = max(0, len(_dispatched(view.entries)) - self._surplus)
        step = view.step + ahead // self.groups_per_step
        if step >= view.last_step or step - view.version > self.max_staleness:
            return None
        return step

    def select(self, view: BufferView) -> list[str] | None:
        usable = [e for e in view.entries if e.state is GroupState.READY and not self._too_old(e, view)]
        usable.sort(key=lambda e: (e.dispatched.start_version, e.order))
        if len(usable) < self.groups_per_step and not (view.exhausted and not _unfinished(view.entries)):
            return None
        chosen = usable[: self.groups_per_step]
        if not self._surplus and not self._leaves_room(view, chosen):
            return None
        return [e.group_id for e in chosen]

    def evict(self, view: BufferView) -> list[str]:
        return [e.group_id for e in view.entries if e.state is GroupState.READY and self._too_old(e, view)]

    def _leaves_room(self, view: BufferView, chosen: Sequence[GroupEntry]) -> bool:
        """Whether every group that is not chosen can still train within the window: earliest deadline first."""
        due = Counter(e.dispatched.start_version + self.max_staleness for e in _dispatched(view.entries))
        due.subtract(e.dispatched.start_version + self.max_staleness for e in chosen)
        overdue = 0
        for step in sorted(due):
            overdue += due[step]
            if overdue > self.groups_per_step * max(0, step - view.step):
                return False
        return True

    def _too_old(self, entry: GroupEntry, view: BufferView) -> bool:
        return view.step - entry.dispatched.start_version > self.max_staleness


class InOrder:
    """Exact batches: a group trains at the step it was dispatched for, and a step waits for all of its groups.

    A dropped group's place is taken by the next dispatch, so each step still has its full number of groups.
    """

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness

    def required_capacity(self) -> int:
        return self.groups_per_step * (self.max_staleness + 1)

    def admit(self, view: BufferView) -> int | None:
        assigned = Counter(e.target_step for e in _dispatched(view.entries))
        step = view.step
        while assigned[step] >= self.groups_per_step:
            step += 1
        if step >= view.last_step or step - view.version > self.max_staleness:
            return None
        return step

    def select(self, view: BufferView) -> list[str] | None:
        targets = [e.target_step for e in view.entries if e.target_step is not None]
        # With no prompt left, a step whose groups were all dropped has no replacement: the next groups move up.
        step = min(targets, default=view.step) if view.exhausted else view.step
        mine = [e for e in view.entries if e.target_step == step]
        ready = [e.group_id for e in mine if e.state is GroupState.READY]
        if len(ready) < len(mine) or (len(ready) < self.groups_per_step and not view.exhausted):
            return None
        return ready

    def evict(self, view: BufferView) -> list[str]:
        return [
            e.group_id
            for e in view.entries
            if e.state is GroupState.READY and e.target_step is not None and e.target_step < view.step
        ]


def _dispatched(entries: Sequence[GroupEntry]) -> list[GroupEntry]:
    return [e for e in entries if e.state is not GroupState.RESERVED]


def _unfinished(entries: Sequence[GroupEntry]) -> list[GroupEntry]:
    return [e for e in entries if e.state in (GroupState.GENERATING, GroupState.FINALIZING)]
