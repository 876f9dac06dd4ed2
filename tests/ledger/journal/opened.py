"""Opens a journal for a test, and reads what is in one without opening it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread

from ledger.events import Event
from ledger.journal import Journal
from ledger.segments import JournalReader, current_files


@asynccontextmanager
async def opened(folder: Path, **options: Any) -> AsyncIterator[tuple[Journal, list[Event]]]:
    journal, events = await Journal.open(folder, **options)
    try:
        yield journal, await anyio.to_thread.run_sync(lambda: list(events))
    finally:
        await journal.aclose()


def events_in(folder: Path) -> list[Event]:
    return list(JournalReader(current_files(folder)).events())


async def write(folder: Path, events: Any, **options: Any) -> None:
    """Append events one after the other: a frame for each."""
    async with opened(folder, **options) as (journal, _):
        for event in events:
            await journal.append(event)
