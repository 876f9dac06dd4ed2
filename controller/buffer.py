"""The replay buffer: one entry per live prompt group, with an explicit state.

Invariant: a permit is held for exactly the groups that are live (in a state that is not an end), after every call,
cancelled or not. A group that ends leaves the buffer with its end recorded in the counts, exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

import anyio

from controller.records import PromptGroup, TrainSample


class GroupState(StrEnum):
    RESERVED = "reserved"
    GENERATING = "generating"
    FINALIZING = "finalizing"
    READY = "ready"
    SELECTED = "selected"
    TRAINED = "trained"
    DROPPED = "dropped"
    EVICTED = "evicted"
    ABORTED = "aborted"


_S = GroupState
_NEXT: dict[GroupState, frozenset[GroupState]] = {
    _S.RESERVED: frozenset({_S.GENERATING, _S.ABORTED}),
    _S.GENERATING: frozenset({_S.FINALIZING, _S.DROPPED, _S.ABORTED}),
    _S.FINALIZING: frozenset({_S.READY, _S.DROPPED, _S.ABORTED}),
    _S.READY: frozenset({_S.SELECTED, _S.EVICTED, _S.ABORTED}),
    _S.SELECTED: frozenset({_S.TRAINED, _S.ABORTED}),
}
ENDS = frozenset({_S.TRAINED, _S.DROPPED, _S.EVICTED, _S.ABORTED})


class IllegalTransition(Exception):
    """A group was asked to go to a state that its present state does not allow, or is not in the buffer."""


@dataclass(eq=False)
class GroupEntry:
    """A live group. `group` and `target_step` are set at dispatch, `samples` when it becomes ready."""

    group_id: str
    order: int
    """Number of the reservation; dispatch order."""
    state: GroupState = GroupState.RESERVED
    group: PromptGroup | None = None
    target_step: int | None = None
    samples: tuple[TrainSample, ...] = ()
    ready_order: int = 0
    """Number of the group among those that became ready."""
    oldest_version: int | None = None
    """The weights of its oldest loss token; None before it is ready."""

    @property
    def dispatched(self) -> PromptGroup:
        if self.group is None:
            raise IllegalTransition(f"group {self.group_id} has not been dispatched")
        return self.group


class LiveGroups(Collection[GroupEntry]):
    """Groups in the order of their dispatch. Those in some state are found without a look at the others: with thousands of
    rollouts in flight, one look at each of them for every change of any would take all of the loop's time."""

    def __init__(self, entries: Iterable[GroupEntry] = ()) -> None:
        self._by_id: dict[str, GroupEntry] = {}
        self._by_state: dict[GroupState, dict[str, GroupEntry]] = {state: {} for state in GroupState}
        for entry in entries:
            self.add(entry)

    def __iter__(self) -> Iterator[GroupEntry]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, entry: object) -> bool:
        return isinstance(entry, GroupEntry) and self.get(entry.group_id) is entry

    def get(self, group_id: str) -> GroupEntry | None:
        return self._by_id.get(group_id)

    def of(self, *states: GroupState) -> Iterable[GroupEntry]:
        """Those in one of the states, by state, and in the order in which they came into it."""
        return chain.from_iterable(self._by_state[state].values() for state in states)

    def count(self, *states: GroupState) -> int:
        return sum(len(self._by_state[state]) for state in states)

    def add(self, entry: GroupEntry) -> None:
        self._by_id[entry.group_id] = self._by_state[entry.state][entry.group_id] = entry

    def move(self, entry: GroupEntry, to: GroupState) -> None:
        """It leaves with a state that is an end."""
        del self._by_state[entry.state][entry.group_id]
        entry.state = to
        if to in ENDS:
            del self._by_id[entry.group_id]
        else:
            self._by_state[to][entry.group_id] = entry


class ReplayBuffer:
    """Holds at most `capacity` live groups. State changes are synchronous; whoever waits, waits on `changed`."""

    def __init__(self, capacity: int) -> None:
        self._permits = anyio.CapacityLimiter(capacity)
        self.entries = LiveGroups()
        self._reservations = 0
        self._ready = 0
        self._changed = anyio.Event()
        self.ended: Counter[GroupState] = Counter()
        """Dispatched groups that ended, by end."""
        self.dropped_for: Counter[int] = Counter()
        """Dropped groups by the step that they had been dispatched for."""

    @property
    def capacity(self) -> int:
        return int(self._permits.total_tokens)

    @property
    def permits_in_use(self) -> int:
        return self._permits.borrowed_tokens

    def counts(self) -> dict[str, int]:
        """Live groups by state."""
        return {str(state): number for state in GroupState if (number := self.entries.count(state))}

    async def reserve(self, group_id: str) -> GroupEntry:
        """Take a slot, waiting for one to be free. A cancellation while waiting leaves nothing reserved."""
        if (present := self.entries.get(group_id)) is not None:
            raise IllegalTransition(f"group {group_id} is in the buffer already ({present.state})")
        # The permit is borrowed on behalf of the entry, so that a leak would name its holder.
        entry = GroupEntry(group_id, order=self._reservations)
        self._reservations += 1
        await self._permits.acquire_on_behalf_of(entry)
        self.entries.add(entry)
        self._notify()
        return entry

    def dispatch(self, group: PromptGroup, *, target_step: int) -> GroupEntry:
        """Reserved → generating: the group's prompt, start version and rollout ids are known from here on."""
        entry = self._move(group.group_id, GroupState.GENERATING)
        entry.group, entry.target_step = group, target_step
        return entry

    def begin_finalizing(self, group_id: str) -> None:
        """Generating → finalizing: every rollout was played."""
        self._move(group_id, GroupState.FINALIZING)

    def commit_finalized(self, group_id: str, samples: Sequence[TrainSample]) -> None:
        """Finalizing → ready: the rows of its valid samples are published. At least one sample must be valid."""
        if not any(s.valid for s in samples):
            raise IllegalTransition(f"group {group_id} has no valid sample; drop it instead")
        entry = self._move(group_id, GroupState.READY)
        entry.samples, entry.ready_order = tuple(samples), self._ready
        entry.oldest_version = min(s.oldest_version for s in samples if s.valid)
        self._ready += 1

    def select(self, group_ids: Sequence[str]) -> list[GroupEntry]:
        """Ready → selected, all or none."""
        for group_id in group_ids:
            self._check(group_id, GroupState.SELECTED)
        return [self._move(group_id, GroupState.SELECTED) for group_id in group_ids]

    def trained(self, group_id: str) -> None:
        self._move(group_id, GroupState.TRAINED)

    def drop(self, group_id: str) -> None:
        """End a group that cannot be trained (no rollout of it could be proven)."""
        entry = self._move(group_id, GroupState.DROPPED)
        if entry.target_step is not None:
            self.dropped_for[entry.target_step] += 1

    def evict(self, group_id: str) -> None:
        """End a ready group that has become too stale."""
        self._move(group_id, GroupState.EVICTED)

    def abort(self, group_id: str) -> None:
        """End a group in any live state, e.g. because the run ends."""
        self._move(group_id, GroupState.ABORTED)

    async def wait_until(self, predicate: Callable[[], bool]) -> None:
        """Return once `predicate()` holds; it is looked at now and after every change or `notify`."""
        while not predicate():
            await self._changed.wait()

    def notify(self) -> None:
        """Wake the waiters to look again, after something they depend on outside the buffer has changed."""
        self._notify()

    def _check(self, group_id: str, to: GroupState) -> GroupEntry:
        entry = self.entries.get(group_id)
        if entry is None:
            raise IllegalTransition(f"group {group_id} is not in the buffer (asked to become {to})")
        if to not in _NEXT[entry.state]:
            raise IllegalTransition(f"group {group_id} is {entry.state} and cannot become {to}")
        return entry

    def _move(self, group_id: str, to: GroupState) -> GroupEntry:
        entry = self._check(group_id, to)
        self.entries.move(entry, to)
        if to in ENDS:
            self._permits.release_on_behalf_of(entry)
            if entry.group is not None:
                self.ended[to] += 1
        self._notify()
        return entry

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
