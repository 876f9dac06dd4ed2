"""The audit: replays a journal and finds the first event that cannot be what was recorded, if there is one. Changes nothing.

Checked are the files (each frame's CRC and place), the state machines of rollouts and groups, each rollout's hash chain
against the heads recorded in it, each verdict against the receipt that the events give, and that every dispatched rollout
is in one place.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ledger import receipts
from ledger.account import Account
from ledger.errors import IllegalTransition, JournalCorrupt, LedgerError
from ledger.events import Compacted, Event, MemoryLog, RolloutAborted, RolloutEvent, RolloutFinalized
from ledger.ledger import Ledger
from ledger.reasons import Rejection
from ledger.segments import JournalReader, Place, TornTail, current_files
from ledger.verify import plan_chain


@dataclass
class Audit:
    """What was found. `broken`: the first broken event's place and what is wrong with it."""

    files: int = 0
    frames: int = 0
    events: int = 0
    verdicts: Counter[str] = field(default_factory=Counter[str])
    """Finished rollouts by verdict: verified, a reason code, or aborted."""
    account: Account = field(default_factory=Account)
    compacted: Compacted | None = None
    """What stands for older events."""
    torn: TornTail | None = None
    broken: tuple[Place, str] | None = None

    @property
    def sound(self) -> bool:
        return self.broken is None and self.account.lost == 0 and self.account.duplicated == 0


class Auditor:
    """Takes events in order; raises a LedgerError at the first that contradicts those before it."""

    def __init__(self) -> None:
        self._ledger = Ledger(MemoryLog(limit=0))
        self._open: dict[str, list[RolloutEvent]] = {}
        self.verdicts: Counter[str] = Counter()

    @property
    def account(self) -> Account:
        return self._ledger.account

    def take(self, event: Event) -> None:
        self._ledger.restore((event,))
        if not isinstance(event, RolloutEvent):
            return
        if isinstance(event, RolloutFinalized):
            _check_verdict(event, self._open.pop(event.rollout_id))
            self.verdicts[event.reason or "verified"] += 1
        elif isinstance(event, RolloutAborted):
            del self._open[event.rollout_id]
            self.verdicts["aborted"] += 1
        else:
            self._open.setdefault(event.rollout_id, []).append(event)


def audit(folder: Path) -> Audit:
    """Audit the journal in `folder`. Raises JournalMoved or OSError."""
    found, auditor, reader = Audit(), Auditor(), JournalReader(())
    try:
        reader = JournalReader(current_files(folder))
        for path, frame in reader:
            for index, event in enumerate(frame.events):
                try:
                    auditor.take(event)
                except LedgerError as e:
                    found.broken = Place(path, frame.offset_of(index)), f"{type(event).__name__}: {e}"
                    return found
                found.events += 1
                if isinstance(event, Compacted):
                    found.compacted = event
            found.frames += 1
    except JournalCorrupt as e:
        found.broken = Place(e.path, e.offset), e.fault
    finally:
        found.files, found.torn = reader.files_read, reader.torn
        found.verdicts, found.account = auditor.verdicts, auditor.account
    return found


def _check_verdict(event: RolloutFinalized, events: list[RolloutEvent]) -> None:
    """A rollout that its own events reject must have been finalized as rejected; its staged rows can only add to that."""
    if event.reason is not None:
        return
    receipt = receipts.rebuild(events)
    rejection = receipt.rejections[0] if receipt.rejections else plan_chain(receipt.rollout_id, receipt.chain)
    if isinstance(rejection, Rejection):
        raise IllegalTransition(
            f"rollout {event.rollout_id!r}",
            f"rejected by its events ({rejection.reason}: {rejection.detail})",
            "finalized as verified",
        )
