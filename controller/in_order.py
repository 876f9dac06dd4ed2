"""Exact batches: a group trains at the step it was dispatched for, and a step waits for all of its groups.

Where a group was dropped, a ready one of a later step is promoted into its place, and a new one is dispatched for that step
instead: what was dispatched ahead is the spare pool. With nothing ready ahead the next dispatch takes the place.
"""

from __future__ import annotations

from controller.buffer import GroupEntry, GroupState
from controller.samplers import BufferView, next_step, wanted


class InOrder:
    """With `min_groups` below `groups_per_step` a dropped group is not replaced, as in the other policies."""

    def __init__(self, groups_per_step: int, max_staleness: int, *, min_groups: int | None = None) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self._floor = groups_per_step if min_groups is None else min_groups

    def required_capacity(self) -> int:
        return self.groups_per_step * (self.max_staleness + 1)

    def admit(self, view: BufferView) -> int | None:
        steps = self._steps(view)
        step = next_step(view)
        while len(steps.get(step, ())) >= self._wanted(view, step):
            step += 1
        if step >= view.last_step or step - view.version > self.max_staleness:
            return None
        return step

    def select(self, view: BufferView) -> list[str] | None:
        steps = self._steps(view)
        mine = steps.get(view.step, [])
        if any(e.state is not GroupState.READY for e in mine):
            return None
        # With no prompt left a step is as short as it is; nothing is left to promote when all of its groups were dropped
        # and those of later steps are under way.
        short = len(mine) < self._wanted(view, view.step)
        if short and (not view.exhausted or (not mine and steps)):
            return None
        return [e.group_id for e in mine]

    def evict(self, view: BufferView) -> list[str]:
        return [e.group_id for e in view.entries.of(GroupState.READY) if _target(e) < view.step]

    def should_abort_inflight(self, view: BufferView) -> list[str]:
        return [e.group_id for e in view.entries.of(GroupState.GENERATING) if _target(e) < view.step]

    def _steps(self, view: BufferView) -> dict[int, list[GroupEntry]]:
        """The live groups by the step that each is to train at."""
        steps: dict[int, list[GroupEntry]] = {}
        if selected := list(view.entries.of(GroupState.SELECTED)):
            steps[view.step] = selected
        for entry in view.entries.of(GroupState.GENERATING, GroupState.FINALIZING, GroupState.READY):
            steps.setdefault(_target(entry), []).append(entry)
        ready = sorted(view.entries.of(GroupState.READY), key=lambda e: (_target(e), e.order))
        for step in range(next_step(view), max(steps, default=view.step)):
            missing = self._wanted(view, step) - len(steps.get(step, ()))
            spare = [e for e in ready if _target(e) > step] if missing > 0 else []
            for entry in spare[:missing]:
                ready.remove(entry)
                steps[_target(entry)].remove(entry)
                steps.setdefault(step, []).append(entry)
        return {step: entries for step, entries in steps.items() if entries}

    def _wanted(self, view: BufferView, step: int) -> int:
        return wanted(view, step, self.groups_per_step, self._floor)


def _target(entry: GroupEntry) -> int:
    assert entry.target_step is not None, f"group {entry.group_id} has not been dispatched"
    return entry.target_step
