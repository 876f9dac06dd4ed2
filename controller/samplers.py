"""Staleness policies: which groups may be dispatched, which train together, which have grown too old.

A sampler is a pure function of a `BufferView`; it holds no state, so what it decides can be replayed and tested.

Staleness is counted in optimizer steps: a group that began under weight version v and trains at step s (0-based) is
s - v steps stale, because version s is what step s starts from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from typing import Literal, Protocol

from controller.buffer import GroupEntry, GroupState, LiveGroups


@dataclass(frozen=True)
class BufferView:
    """What a sampler sees."""

    step: int
    """The step being trained, or the next one (0-based)."""
    version: int
    """The weight version that a dispatch would begin under now."""
    last_step: int
    """Steps [0, last_step) are to be trained."""
    entries: LiveGroups
    """The live groups, in dispatch order."""
    exhausted: bool = False
    """No further prompt will come."""
    dropped: Mapping[int, int] = field(default_factory=dict[int, int])
    """Groups that were dropped, by the step that they had been dispatched for."""


class Sampler(Protocol):
    """One policy. `select` must come to name a step whenever everything that `admit` lets in has become ready."""

    groups_per_step: int

    def required_capacity(self) -> int:
        """Live groups that the buffer must hold for the policy not to block itself."""
        ...

    def admit(self, view: BufferView) -> int | None:
        """The step that a group dispatched now would train at; None when it must not be dispatched now."""
        ...

    def select(self, view: BufferView) -> list[str] | None:
        """The groups of step `view.step`, which are ready; None while they are not all there."""
        ...

    def evict(self, view: BufferView) -> list[str]:
        """Ready groups that no step can use any more."""
        ...

    def should_abort_inflight(self, view: BufferView) -> list[str]:
        """Groups that still generate, and that no step can use any more when they are done."""
        ...


class _Window:
    """What the policies share that train whichever groups are within the age window.

    With `min_groups` below `groups_per_step` a dropped group is not replaced: its step trains with fewer groups, down to
    that many.
    """

    def __init__(
        self, groups_per_step: int, max_staleness: int, *, surplus: int = 0, min_groups: int | None = None
    ) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self._floor = groups_per_step if min_groups is None else min_groups
        self._surplus = surplus

    def required_capacity(self) -> int:
        return self.groups_per_step * (self.max_staleness + 1) + self._surplus

    def admit(self, view: BufferView) -> int | None:
        upcoming = next_step(view)
        unchosen = len(view.entries) - view.entries.count(GroupState.RESERVED, GroupState.SELECTED)
        missing = sum(
            self.groups_per_step - wanted(view, step, self.groups_per_step, self._floor)
            for step in view.dropped
            if step >= upcoming
        )
        step = upcoming + max(0, unchosen + missing - self._surplus) // self.groups_per_step
        if step >= view.last_step or step - view.version > self.max_staleness:
            return None
        return step

    def evict(self, view: BufferView) -> list[str]:
        return [e.group_id for e in view.entries.of(GroupState.READY) if self._due(e) < view.step]

    def should_abort_inflight(self, view: BufferView) -> list[str]:
        step = next_step(view)
        # Weights never go back, so that the oldest groups are the first.
        useless = takewhile(lambda e: self._due(e) < step, view.entries.of(GroupState.GENERATING))
        return [e.group_id for e in useless]

    def _due(self, entry: GroupEntry) -> int:
        """The last step that may train the group."""
        return entry.dispatched.start_version + self.max_staleness

    def _usable(self, view: BufferView) -> list[GroupEntry]:
        return [e for e in view.entries.of(GroupState.READY) if self._due(e) >= view.step]

    def _enough(self, view: BufferView, groups: Sequence[GroupEntry]) -> bool:
        if view.exhausted and not view.entries.count(GroupState.GENERATING, GroupState.FINALIZING):
            return True
        return len(groups) >= wanted(view, view.step, self.groups_per_step, self._floor)

    def _leaves_room(self, view: BufferView, chosen: Sequence[GroupEntry]) -> bool:
        """Whether every group that is not chosen can still train within the window: earliest deadline first."""
        due = Counter(self._due(e) for e in view.entries if e.state is not GroupState.RESERVED)
        due.subtract(self._due(e) for e in chosen)
        overdue = 0
        for step in sorted(due):
            overdue += due[step]
            if overdue > self.groups_per_step * max(0, step - view.step):
                return False
        return True


class Windowed(_Window):
    """Any ready groups within the age window, those of the oldest weights first.

    With `over_sampling` 1 a step waits for groups that would otherwise grow too old, so none is lost for being slow. With
    more, surplus groups are dispatched, a step takes the first that are ready, and what grows too old is evicted, or
    aborted where it still generates. `freshest_first` then takes those of the newest weights instead.

    `age` says from when on a ready group ages: its dispatch, or the weights of its oldest loss token, which are newer when
    it waited for an engine. How old the tokens of a group become that still generates is not known, so that is no reason to
    abort it then.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        over_sampling: float = 1.0,
        *,
        age: Literal["dispatch", "oldest_token"] = "dispatch",
        freshest_first: bool = False,
        min_groups: int | None = None,
    ) -> None:
        window = groups_per_step * (max_staleness + 1)
        surplus = math.ceil(window * over_sampling) - window
        super().__init__(groups_per_step, max_staleness, surplus=surplus, min_groups=min_groups)
        if freshest_first and not surplus:
            raise ValueError("freshest_first needs over_sampling > 1: without a surplus no group may be left over")
        self._by_token = age == "oldest_token"
        self._freshest_first = freshest_first

    def select(self, view: BufferView) -> list[str] | None:
        usable = self._usable(view)
        if not self._enough(view, usable):
            return None
        usable.sort(key=lambda e: ((-1 if self._freshest_first else 1) * self._due(e), e.order))
        chosen = usable[: self.groups_per_step]
        return [e.group_id for e in chosen] if self._surplus or self._leaves_room(view, chosen) else None

    def should_abort_inflight(self, view: BufferView) -> list[str]:
        return [] if self._by_token else super().should_abort_inflight(view)

    def _due(self, entry: GroupEntry) -> int:
        if self._by_token and entry.oldest_version is not None:
            return entry.oldest_version + self.max_staleness
        return super()._due(entry)


class ReadyFirst(_Window):
    """The groups that were ready first, whatever weights they began with: a slow group never holds up a step.

    What grows too old meanwhile is evicted, or aborted where it still generates, and others are dispatched in its place.
    """

    def select(self, view: BufferView) -> list[str] | None:
        chosen = sorted(self._usable(view), key=lambda e: e.ready_order)[: self.groups_per_step]
        return [e.group_id for e in chosen] if self._enough(view, chosen) else None


class WeightFifo(_Window):
    """Groups in the order of the weights they began with: none trains while one of older weights still generates.

    Among those of the same weights the first that are ready. No group is lost for being slow.
    """

    def select(self, view: BufferView) -> list[str] | None:
        generating, finalizing = view.entries.of(GroupState.GENERATING), view.entries.of(GroupState.FINALIZING)
        # Of those that generate, the first began under the oldest weights.
        unfinished = chain(islice(generating, 1), finalizing)
        oldest = min((e.dispatched.start_version for e in unfinished), default=view.step)
        usable = [e for e in self._usable(view) if e.dispatched.start_version <= oldest]
        if not self._enough(view, usable):
            return None
        usable.sort(key=lambda e: (e.dispatched.start_version, e.ready_order))
        chosen = usable[: self.groups_per_step]
        return [e.group_id for e in chosen] if self._leaves_room(view, chosen) else None


def wanted(view: BufferView, step: int, groups_per_step: int, floor: int) -> int:
    """How many groups a step waits for: those that were dropped aside, but not fewer than `floor`."""
    return max(floor, groups_per_step - view.dropped.get(step, 0))


def next_step(view: BufferView) -> int:
    """The step that groups are yet to be selected for."""
    return view.step + bool(view.entries.count(GroupState.SELECTED))
