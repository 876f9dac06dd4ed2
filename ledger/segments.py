"""A journal's files: segments of frames, in order, in one folder. They are read whole, or it is said where not.

    segment-000007.log    frames as they were written; the next segment goes on where it ends
    compact-000004.log    stands for the segments up to 4: what is left of them (see `ledger.compaction`)

Each file begins with a header: magic, format, flags, where its chain of frames begins, CRC. A compacted file's own chain
begins anew; its header says where the segment after it goes on. Only the last segment can have a torn tail.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from ledger.errors import JournalCorrupt, JournalMoved
from ledger.events import Event
from ledger.frames import START, Frame, FrameFault, FrameReader, Link, UnknownEvents

FOLDER = "ledger"
"""A journal's, in its run's folder."""
MAGIC = b"MLLEDGER"
FORMAT = 1
SYNCED = 1
"""Flag: each frame was on the disk before the next one was written."""
MAX_FILE = 1 << 31
"""Bytes; a larger file is none of ours."""
_HEADER = Struct("<8sIIQI")
_CRC = Struct("<I")
HEADER_LEN = _HEADER.size + _CRC.size
_NAME = re.compile(r"(segment|compact)-([0-9]{6,12})\.log")
TEMPORARY = ".writing"


class Segment(NamedTuple):
    path: Path
    number: int
    compacted: bool


class Place(NamedTuple):
    path: Path
    offset: int

    def __str__(self) -> str:
        return f"{self.path.name} at byte {self.offset}"


class TornTail(NamedTuple):
    """Bytes at the end of the last segment that hold no whole frame: nothing in them was acknowledged as durable."""

    place: Place
    size: int
    why: str


class Found(NamedTuple):
    """A frame that was read, and the file that it is in."""

    path: Path
    frame: Frame

    def place(self, index: int) -> Place:
        """Of the frame's event `index`."""
        return Place(self.path, self.frame.offset_of(index))


def segment_path(folder: Path, number: int, *, compacted: bool = False) -> Path:
    return folder / f"{'compact' if compacted else 'segment'}-{number:06d}.log"


def all_files(folder: Path) -> list[Segment]:
    """Every segment file in the folder, also those that a compacted one stands for."""
    found: list[Segment] = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found.append(Segment(path, int(match[2]), match[1] == "compact"))
    return sorted(found, key=lambda s: (s.number, s.compacted))


def current_files(folder: Path) -> list[Segment]:
    """The files that make up the journal, in order. Raises JournalCorrupt when one is missing between two others."""
    files = all_files(folder)
    while True:
        try:
            return _current(folder, files)
        except JournalCorrupt:
            before, files = files, all_files(folder)
            if files == before:
                raise
            # The folder was listed while a compaction replaced files.


def _current(folder: Path, files: list[Segment]) -> list[Segment]:
    start = max((i for i, segment in enumerate(files) if segment.compacted), default=0)
    current = files[start:]
    expected = current[0].number if current and current[0].compacted else 1
    for segment in current:
        if segment.number != expected:
            raise JournalCorrupt(
                segment_path(folder, expected), 0, f"the file is missing; {segment.path.name} is there"
            )
        expected += 1
    return current


def header(link: Link, *, synced: bool) -> bytes:
    fields = _HEADER.pack(MAGIC, FORMAT, SYNCED if synced else 0, link.number, link.crc)
    return fields + _CRC.pack(zlib.crc32(fields))


class SegmentReader:
    """Reads one file. `last`: whether it may have a torn tail, which `torn` then says.

    `link` is where the next file must go on, `end` how many bytes are good, both as far as it was read.
    """

    def __init__(self, segment: Segment, *, last: bool) -> None:
        self._path = segment.path
        self._compacted = segment.compacted
        self._may_tear = last and not segment.compacted
        self._synced = True
        self._data = _load(segment.path)
        self.torn: TornTail | None = None
        self.begin = self._header()
        """Where the chain begins, for a compacted file where it goes on after it; None when the header itself is torn."""
        self._frames = FrameReader(
            self._data,
            len(self._data) if self.begin is None else HEADER_LEN,
            START if self.begin is None or segment.compacted else self.begin,
        )

    @property
    def end(self) -> int:
        return 0 if self.begin is None else self._frames.offset

    @property
    def link(self) -> Link:
        return self._frames.link if self.begin is None or not self._compacted else self.begin

    def __iter__(self) -> Iterator[Found]:
        """Raises JournalCorrupt."""
        try:
            for frame in self._frames:
                yield Found(self._path, frame)
        except FrameFault as fault:
            self._tear(fault.offset, str(fault), later=fault.later)
        except UnknownEvents as e:
            raise JournalCorrupt(self._path, e.offset, f"the frame holds something that is no known event: {e}") from e

    def skim(self) -> None:
        """Go over the frames without decoding their events. Raises JournalCorrupt."""
        try:
            for _ in self._frames.payloads():
                pass
        except FrameFault as fault:
            self._tear(fault.offset, str(fault), later=fault.later)

    def _header(self) -> Link | None:
        """None for a torn one."""
        if len(self._data) >= HEADER_LEN:
            magic, version, flags, number, crc = _HEADER.unpack_from(self._data)
            (recorded,) = _CRC.unpack_from(self._data, _HEADER.size)
            if magic == MAGIC and recorded == zlib.crc32(self._data[: _HEADER.size]):
                if version != FORMAT:
                    raise JournalCorrupt(self._path, 0, f"its format is {version}; this program reads format {FORMAT}")
                self._synced = bool(flags & SYNCED)
                return Link(number, crc)
            # Its sector was written before anything else was. A crash can leave it short, or a hole; nothing else can.
            if any(self._data[:HEADER_LEN]):
                raise JournalCorrupt(self._path, 0, "this is not the header of a ledger's file, or it was altered")
        frames = FrameReader(self._data, min(HEADER_LEN, len(self._data)), START)
        try:
            intact = next(frames.payloads(), None) is not None
        except FrameFault as fault:
            intact = fault.later
        self._tear(0, "the file's header is not whole", later=intact)
        return None

    def _tear(self, offset: int, why: str, *, later: bool) -> None:
        if not self._may_tear or (later and self._synced):
            raise JournalCorrupt(self._path, offset, why)
        self.torn = TornTail(Place(self._path, offset), len(self._data) - offset, why)


class JournalReader:
    """Iterates over a journal's frames, oldest first, changing nothing; also while the journal is being written.

    `complete`: whether other files follow, so that even the last of these can have no torn tail. Raises JournalCorrupt,
    JournalMoved or OSError. At the end `torn` and `link`, where the journal goes on, are set.
    """

    def __init__(self, files: Iterable[Segment], *, complete: bool = False) -> None:
        self._files = list(files)
        self._complete = complete
        self.torn: TornTail | None = None
        self.link: Link | None = None
        self.files_read = 0

    def __iter__(self) -> Iterator[Found]:
        for segment in self._files:
            self.files_read += 1
            reader = SegmentReader(segment, last=not self._complete and segment is self._files[-1])
            check_joint(reader, segment, self.link)
            yield from reader
            self.link = reader.link
            self.torn = reader.torn

    def events(self) -> Iterator[Event]:
        for found in self:
            yield from found.frame.events


def check_joint(reader: SegmentReader, segment: Segment, link: Link | None) -> None:
    """Raises JournalCorrupt unless the segment goes on at `link`, where the file before it ended (None: there is none)."""
    if segment.compacted or reader.begin is None:
        return
    expected = START if link is None else link
    if reader.begin != expected:
        raise JournalCorrupt(
            segment.path,
            0,
            f"it goes on at frame {reader.begin.number}, but the file before it ends at {expected.number}"
            if reader.begin.number != expected.number
            else "the last frame of the file before it was altered after it was written",
        )


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | bytearray) -> None:
    """Write every byte; `os.write` alone may stop short."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _load(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_FILE:
            raise JournalCorrupt(path, MAX_FILE, f"it has {size} bytes; a segment has at most {MAX_FILE}")
        return path.read_bytes()
    except FileNotFoundError as e:
        raise JournalMoved(path) from e
