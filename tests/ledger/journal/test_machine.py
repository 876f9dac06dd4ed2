"""The ledger's state machine over a journal that rotates, compacts and crashes: what is on disk is what is in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from ledger.audit import audit
from ledger.errors import JournalMoved
from ledger.events import Compacted, Event, MemoryLog
from ledger.journal import Journal
from ledger.ledger import Ledger
from ledger.segments import JournalReader, current_files
from tests.ledger.journal.histories import standing
from tests.ledger.rig import Rig
from tests.ledger.test_machine import LedgerMachine

T = TypeVar("T")


class Both(MemoryLog):
    """Keeps in memory what it writes to the journal."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal = journal

    async def append(self, event: Event) -> None:
        await super().append(event)
        await self.journal.append(event)


class JournalledLedger(LedgerMachine):
    @initialize(segment_bytes=st.sampled_from([400, 3000, 1 << 20]), history_bytes=st.sampled_from([0, 4000, 1 << 30]))
    def begin(self, segment_bytes: int, history_bytes: int) -> None:
        shm = Path("/dev/shm")
        self.temporary = tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None)
        self.folder = Path(self.temporary.name)
        self.options = {"segment_bytes": segment_bytes, "history_bytes": history_bytes}
        self.log, _ = self.open()
        self.rig = Rig(self.log)
        self.dispatch()

    def open(self) -> tuple[Both, list[Event]]:
        journal, events = self.do(Journal.open(self.folder, **self.options))
        return Both(journal), list(events)

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.do(self.log.journal.aclose())
            self.temporary.cleanup()
        super().teardown()

    @rule(step=st.integers(0, 9))
    def checkpoint(self, step: int) -> None:
        self.do(self.rig.ledger.checkpointed(step))

    @rule()
    def crash_and_restore(self) -> None:
        """A new process: another ledger, restored from the journal, goes on where the first one was."""
        self.do(self.log.journal.aclose())
        written, (log, found) = self.log.events, self.open()
        assert standing(found) == standing(written)
        log.events = written
        ledger = Ledger(log)
        ledger.restore(found)
        self.log, self.rig = log, Rig(log, ledger=ledger, worker=self.rig.worker)

    @rule()
    def resume(self) -> None:
        """What is live is given up, as it is when a run is resumed from a checkpoint."""
        self.do(self.rig.ledger.resumed(step=0))
        assert self.rig.ledger.account.live == 0
        for rollouts in self.groups.values():
            self.ends["aborted"] += len(rollouts)
            for rollout_id in rollouts:
                del self.rollouts[rollout_id]
        self.groups.clear()
        self.ready.clear()

    @invariant()
    def the_journal_is_sound(self) -> None:
        if not hasattr(self, "log"):
            return
        found = self.while_it_may_be_compacted(lambda: list(JournalReader(current_files(self.folder)).events()))
        if not isinstance(found[0], Compacted):
            assert found == list(self.log.events)
        report = self.while_it_may_be_compacted(lambda: audit(self.folder))
        assert report.sound, report.broken
        assert report.account == self.rig.ledger.account

    @staticmethod
    def while_it_may_be_compacted(read: Callable[[], T]) -> T:
        while True:
            with suppress(JournalMoved):
                return read()


TestJournalledLedger = JournalledLedger.TestCase
TestJournalledLedger.settings = settings(max_examples=40, stateful_step_count=40)
