"""The run's ledger, on the disk in the run's folder: taken up where an earlier process left it, closed in the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio.to_thread

from controller.config.schema import Config
from ledger.errors import JournalFailed, LedgerError
from ledger.journal import Journal
from ledger.ledger import Ledger
from ledger.segments import FOLDER


@asynccontextmanager
async def open_run_ledger(config: Config, run_dir: Path, *, resumed_from: int | None) -> AsyncGenerator[Ledger]:
    """The ledger of the run in `run_dir`. What an earlier process left live is ended, since its prompts are played anew.

    `resumed_from`: the step of the checkpoint that the run goes on from. Leaving closes the journal, within a bound.
    Raises OSError, and LedgerError also for a record that is not whole.
    """
    settings, capture = config.ledger, config.token_capture
    folder = run_dir / FOLDER
    with _remedied(folder):
        journal, events = await Journal.open(
            folder,
            durability=settings.durability,
            segment_bytes=settings.segment_mb << 20,
            history_bytes=settings.history_mb << 20,
        )
    async with _closing(journal):
        ledger = Ledger(journal, trajectory=capture.trajectory if capture.enabled else "echo")
        with _remedied(folder):
            await anyio.to_thread.run_sync(ledger.restore, events)
        if resumed_from is not None:
            await ledger.resumed(resumed_from)
        yield ledger


@contextmanager
def _remedied(folder: Path) -> Generator[None]:
    try:
        yield
    except LedgerError as e:
        e.add_note(
            f"`python -m ledger verify {folder}` says what is broken. To go on without this record move {folder} away; "
            "the checkpoints do not need it"
        )
        raise


@asynccontextmanager
async def _closing(journal: Journal) -> AsyncGenerator[None]:
    """An error of the body comes first; a failed closing is then a note on it."""
    try:
        yield
    except BaseException as e:
        try:
            await journal.aclose()
        except JournalFailed as late:
            e.add_note(f"Then: {late}")
        raise
    await journal.aclose()
