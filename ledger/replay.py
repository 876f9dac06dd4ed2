"""Replays a log, every event checked as the ledger checked it, and keeps the events of the groups that are live."""

from __future__ import annotations

from itertools import count

from ledger.events import (
    CheckpointMarked,
    Compacted,
    Event,
    GroupDispatched,
    GroupEnd,
    GroupEvent,
    MemoryLog,
    RolloutReplaced,
    RunResumed,
)
from ledger.ledger import Ledger


class Replay:
    """Memory is bounded by the live groups."""

    def __init__(self) -> None:
        self.ledger = Ledger(MemoryLog(limit=0))
        self._live: dict[str, list[tuple[int, Event]]] = {}
        self._group_of: dict[str, str] = {}
        self._places = count()

    def take(self, event: Event) -> list[Event]:
        """All events of the group that this event ends, itself included; nothing while none ends. Raises a LedgerError."""
        self.ledger.restore((event,))
        match event:
            case Compacted() | CheckpointMarked() | RunResumed():
                return []
            case GroupDispatched():
                self._live[event.group_id] = []
                self._group_of.update(dict.fromkeys(event.rollout_ids, event.group_id))
            case RolloutReplaced():
                self._group_of[event.by] = event.group_id
            case _:
                pass
        group_id = event.group_id if isinstance(event, GroupEvent) else self._group_of[event.rollout_id]
        self._live[group_id].append((next(self._places), event))
        return self._end(group_id) if isinstance(event, GroupEnd) else []

    def live(self) -> list[list[Event]]:
        """The events of each live group."""
        return [[event for _, event in entries] for entries in self._live.values()]

    def remaining(self) -> list[Event]:
        """The events of all live groups, in their order."""
        entries = [entry for entries in self._live.values() for entry in entries]
        entries.sort(key=lambda entry: entry[0])
        return [event for _, event in entries]

    def _end(self, group_id: str) -> list[Event]:
        events = [event for _, event in self._live.pop(group_id)]
        for event in events:
            if isinstance(event, GroupDispatched):
                for rollout_id in event.rollout_ids:
                    del self._group_of[rollout_id]
            elif isinstance(event, RolloutReplaced):
                del self._group_of[event.by]
        return events
