"""Compaction: the oldest segments give way to one file with what still counts of them; a crash leaves one or the other.

What counts is how many rollouts ended, by end, and all that was recorded of the groups that had not ended by then.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ledger.events import Compacted, Event
from ledger.frames import FRAME_BYTES, START, FrameBuilder
from ledger.replay import Replay
from ledger.segments import (
    TEMPORARY,
    JournalReader,
    Segment,
    all_files,
    current_files,
    header,
    segment_path,
    sync_folder,
    write_all,
)


def compact(folder: Path, *, before: int, keep_bytes: int) -> Path | None:
    """Compact the oldest segments, all numbered below `before`, until the files have `keep_bytes` or less; the new file.

    Blocking, for some 10 us per event. For the process that writes the journal. Raises JournalCorrupt, another LedgerError
    for events that contradict each other, or OSError; then nothing has changed.
    """
    files = current_files(folder)
    old = _surplus(files, before, keep_bytes)
    if not old:
        return None
    reader = JournalReader(old, complete=True)
    left = fold(reader.events())
    assert reader.link is not None
    path = segment_path(folder, old[-1].number, compacted=True)
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        _write(temporary, header(reader.link, synced=True), left)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(folder)
    for segment in all_files(folder):
        if segment.number <= old[-1].number and segment.path != path:
            segment.path.unlink()
    return path


def fold(events: Iterable[Event]) -> list[Event]:
    """The shortest log after which a ledger stands as it does after `events`. Raises a LedgerError for impossible ones."""
    replay = Replay()
    for event in events:
        replay.take(event)
    account = replay.ledger.account
    totals = Compacted(
        trained=account.trained,
        evicted=account.evicted,
        dropped=account.dropped,
        aborted=account.aborted,
        last_group=replay.ledger.last_group,
    )
    return [totals, *replay.remaining()]


def _surplus(files: list[Segment], before: int, keep_bytes: int) -> list[Segment]:
    """The oldest files to compact: none, or one segment at least."""
    sizes = [segment.path.stat().st_size for segment in files]
    total, surplus = sum(sizes), 0
    for segment, size in zip(files, sizes, strict=True):
        if total <= keep_bytes or segment.number >= before:
            break
        total -= size
        surplus += 1
    old = files[:surplus]
    return [] if all(segment.compacted for segment in old) else old


def _write(path: Path, head: bytes, events: Iterable[Event]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, head)
        link, builder = START, FrameBuilder()
        for event in events:
            builder.add(event)
            if builder.size >= FRAME_BYTES:
                frame, link = builder.seal(link)
                write_all(fd, frame)
                builder = FrameBuilder()
        if builder.count:
            write_all(fd, builder.seal(link)[0])
        os.fsync(fd)
    finally:
        os.close(fd)
