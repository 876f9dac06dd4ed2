"""A journal's files as their writer sees them. Everything blocks: for the journal's thread, and for opening.

One process at a time has a folder. A file's name is durable before anything in it is acknowledged.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import NamedTuple

from ledger.errors import JournalBusy
from ledger.frames import START, FrameBuilder, Link
from ledger.segments import (
    HEADER_LEN,
    TEMPORARY,
    Segment,
    SegmentReader,
    all_files,
    check_joint,
    current_files,
    header,
    segment_path,
    sync_folder,
    write_all,
)

LOCK = ".lock"


class SegmentWriter:
    """Appends frames; begins a new file with the first one, and when a file has `segment_bytes`.

    After an OSError, `path` is the file that could not be written, and nothing more may be written.
    """

    def __init__(self, lock: int, folder: Path, link: Link, *, number: int, segment_bytes: int, sync: bool) -> None:
        self._lock = lock
        self._folder = folder
        self._link = link
        self._segment_bytes = segment_bytes
        self.sync = sync
        self._fd: int | None = None
        self._size = 0
        self.number = number
        """Of the file being written, or of the next one."""

    @property
    def path(self) -> Path:
        return segment_path(self._folder, self.number)

    def write(self, builder: FrameBuilder) -> None:
        """Append a frame; with `sync`, it is on the disk then."""
        frame, link = builder.seal(self._link)
        if self._fd is not None and self._size >= self._segment_bytes:
            self._end_file()
            self.number += 1
        fd = self._begin_file() if self._fd is None else self._fd
        write_all(fd, frame)
        self._size += len(frame)
        self._link = link

    def close(self) -> None:
        """End the file, durably, and let go of the folder."""
        try:
            self._end_file()
        finally:
            os.close(self._lock)

    def _begin_file(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        # With O_DSYNC a write returns when it is on the disk: one system call, and one wait for the GIL, per frame.
        self._fd = os.open(self.path, flags | (os.O_DSYNC if self.sync else 0), 0o644)
        write_all(self._fd, header(self._link, synced=self.sync))
        sync_folder(self._folder)
        self._size = HEADER_LEN
        return self._fd

    def _end_file(self) -> None:
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        try:
            if not self.sync:
                os.fdatasync(fd)
        finally:
            os.close(fd)


class Opened(NamedTuple):
    writer: SegmentWriter
    files: list[Segment]
    """The journal so far."""


def open_folder(folder: Path, *, segment_bytes: int, sync: bool) -> Opened:
    """Take a folder, which is made if need be, for writing, and repair it.

    A torn tail is cut off, and what a crash left over is removed. Raises JournalBusy, JournalCorrupt, OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sync_folder(folder.parent)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalBusy(folder) from None
        files = current_files(folder)
        link = _repair(files)
        _remove_leftovers(folder, files)
    except BaseException:
        os.close(lock)
        raise
    number = files[-1].number + 1 if files else 1
    writer = SegmentWriter(lock, folder, link, number=number, segment_bytes=segment_bytes, sync=sync)
    return Opened(writer, files)


def _repair(files: list[Segment]) -> Link:
    """Cut off the last file's torn tail, or drop the file when nothing else is in it. Returns where the chain ends.

    Before anything is changed, the last file with frames is checked, and a compacted one, whose originals are removed.
    """
    if files and files[0].compacted:
        SegmentReader(files[0], last=False).skim()
    last = True
    link, empty = START, list[Path]()
    while files:
        reader = SegmentReader(files[-1], last=last)
        if len(files) == 1:
            check_joint(reader, files[-1], None)
        reader.skim()
        if reader.end > HEADER_LEN or files[-1].compacted:
            if reader.torn is not None:
                _truncate(files[-1].path, reader.end)
            link = reader.link
            break
        empty.append(files.pop().path)
        last = False
    for path in empty:
        path.unlink()
    return link


def _truncate(path: Path, size: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_leftovers(folder: Path, files: list[Segment]) -> None:
    for segment in all_files(folder):
        if segment not in files:
            segment.path.unlink()
    for path in folder.glob(f"*{TEMPORARY}"):
        path.unlink()
    sync_folder(folder)
