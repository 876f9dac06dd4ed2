"""Reopening after a crash or damage: all that was acknowledged is there, or an error says where it is not."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import zlib
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ledger.segments
import ledger.writer
from ledger.errors import JournalCorrupt
from ledger.events import Event, TerminalDeclared
from ledger.frames import MAX_PAYLOAD, START, FrameBuilder
from ledger.segments import FORMAT, HEADER_LEN, MAGIC, Found, JournalReader, SegmentReader, current_files, segment_path
from tests.ledger.journal.histories import history, standing
from tests.ledger.journal.opened import events_in, opened, write

pytestmark = pytest.mark.anyio

EVENTS = history()[:10]
MARK = TerminalDeclared(rollout_id="r", call_id="after the crash")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of three segments, a frame per event."""
    folder = tmp_path_factory.mktemp("journals") / "ledger"
    anyio.run(lambda: write(folder, EVENTS, segment_bytes=900))
    assert len(current_files(folder)) == 3
    return folder


def frame_starts(path: Path) -> list[int]:
    return [f.frame.offset for f in JournalReader(current_files(path.parent)) if f.path == path]


def reopened(folder: Path) -> list[Event]:
    """Open, append one more, and return what was there before."""

    async def reopen() -> list[Event]:
        async with opened(folder) as (journal, events):
            await journal.append(MARK)
            return events

    events = anyio.run(reopen)
    assert events_in(folder) == [*events, MARK]
    return events


def copied(folder: Path, tmp_path: Path) -> Path:
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    return shutil.copytree(folder, tmp_path / "copy")


def test_a_tail_torn_at_any_byte_is_repaired(written: Path, tmp_path: Path):
    last = current_files(written)[-1].path
    before = len(EVENTS) - len(frame_starts(last))
    starts = [*frame_starts(last), last.stat().st_size]
    sizes = random.Random(0).sample(range(HEADER_LEN, starts[-1]), 60)
    for size in [0, 1, HEADER_LEN - 1, HEADER_LEN, *starts, *sizes]:
        folder = copied(written, tmp_path)
        os.truncate(folder / last.name, size)
        whole = sum(end <= size for end in starts[1:])
        assert reopened(folder) == list(EVENTS[: before + whole])


def test_a_tail_of_anything_is_repaired(written: Path, tmp_path: Path):
    rng = random.Random(0)
    last = current_files(written)[-1].path
    for junk in (b"\0", b"\0" * 5000, last.read_bytes()[HEADER_LEN:][:100], rng.randbytes(300)):
        folder = copied(written, tmp_path)
        with (folder / last.name).open("ab") as file:
            file.write(junk)
        assert reopened(folder) == list(EVENTS)


def test_a_flipped_bit_at_any_byte_is_an_error_that_says_where_unless_it_may_be_a_torn_tail(written: Path, ram: Path):
    """Read only, so that every byte can be tried."""
    segments = current_files(written)
    for segment in (segments[0], segments[-1]):
        last = segment == segments[-1]
        data = segment.path.read_bytes()
        events = list(SegmentReader(segment, last=last))
        starts = [found.frame.offset for found in events]
        flipped = segment._replace(path=ram / segment.path.name)
        for offset in range(len(data)):
            altered = bytearray(data)
            altered[offset] ^= 1 << offset % 8
            flipped.path.write_bytes(altered)
            damaged = sum(start <= offset for start in starts) - 1
            found: list[Found] = []
            if last and damaged == len(starts) - 1:
                reader = SegmentReader(flipped, last=True)
                found.extend(reader)
                assert reader.torn is not None
                assert reader.torn.place == (flipped.path, starts[-1])
            else:
                with pytest.raises(JournalCorrupt) as corrupt:
                    found.extend(SegmentReader(flipped, last=last))
                assert corrupt.value.path == flipped.path
                assert corrupt.value.offset == (0 if damaged < 0 else starts[damaged])
            assert [f.frame for f in found] == [f.frame for f in events[: max(damaged, 0)]]


@pytest.mark.parametrize("which", [0, 1])
def test_damage_before_the_last_segment_is_never_repaired(written: Path, tmp_path: Path, which: int):
    folder = copied(written, tmp_path)
    path = current_files(folder)[which].path
    os.truncate(path, path.stat().st_size - 1)
    size = path.stat().st_size
    with pytest.raises(JournalCorrupt, match=path.name):
        reopened(folder)
    assert path.stat().st_size == size


def test_damage_before_a_segment_that_was_only_begun_is_never_repaired(written: Path, tmp_path: Path):
    folder = copied(written, tmp_path)
    number = current_files(folder)[-1].number
    path = segment_path(folder, number)
    os.truncate(path, path.stat().st_size - 1)
    begun = segment_path(folder, number + 1)
    begun.touch()
    with pytest.raises(JournalCorrupt, match=path.name):
        reopened(folder)
    assert begun.exists()


@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_segment_is_named(written: Path, tmp_path: Path, which: int):
    folder = copied(written, tmp_path)
    path = current_files(folder)[which].path
    path.unlink()
    with pytest.raises(JournalCorrupt, match=f"{path.name}.*missing"):
        reopened(folder)


def test_a_segment_of_another_journal_is_refused(written: Path, tmp_path: Path):
    folder = copied(written, tmp_path)
    other = tmp_path / "other"
    anyio.run(lambda: write(other, history(seed=1)[:10], segment_bytes=900))
    shutil.copy(other / "segment-000002.log", folder)
    with pytest.raises(JournalCorrupt, match=r"segment-000002.log: at byte 0"):
        reopened(folder)


def test_a_segment_of_a_later_format_is_refused_and_kept(tmp_path: Path):
    anyio.run(lambda: write(tmp_path, EVENTS))
    path = segment_path(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[8] = FORMAT + 1
    data[HEADER_LEN - 4 : HEADER_LEN] = zlib.crc32(data[: HEADER_LEN - 4]).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(JournalCorrupt, match=f"its format is {FORMAT + 1}; this program reads format {FORMAT}"):
        reopened(tmp_path)
    assert path.read_bytes() == data


@pytest.mark.parametrize("foreign", [b"\x7fELF" * 500, b"#" * 32, MAGIC + bytes(24)])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, foreign: bytes):
    """It is no torn tail, though no frame is in it."""
    path = segment_path(tmp_path, 1)
    path.write_bytes(foreign)
    with pytest.raises(
        JournalCorrupt, match=r"segment-000001.log: at byte 0: this is not the header of a ledger's file"
    ):
        reopened(tmp_path)
    assert path.read_bytes() == foreign


async def test_without_durability_a_hole_in_the_last_segment_is_a_torn_tail(tmp_path: Path):
    """A crash of the machine can keep a later page and lose an earlier one."""
    async with opened(tmp_path, durability="none") as (journal, _):
        for event in EVENTS:
            await journal.append(event)
            await anyio.sleep(0.01)  # So that it is written by itself.
    path = segment_path(tmp_path, 1)
    starts = frame_starts(path)
    assert len(starts) > 2
    data = bytearray(path.read_bytes())
    data[starts[-2] : starts[-2] + 100] = bytes(100)
    path.write_bytes(data)
    async with opened(tmp_path) as (_, events):
        assert events == list(EVENTS[: len(events)])
        assert 0 < len(events) < len(EVENTS) - 1


class PowerCuts:
    """Cuts the power before each write and sync, on a copy: what was durable then is there, and any part of the rest."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
        self.acknowledged = 0
        self.survived: list[tuple[int, Path]] = []
        """How much was acknowledged when the power went, and what the disk holds."""
        self._folder = folder
        self._rng = rng
        self._durable: dict[str, int] = {}
        self._named: set[str] = set()
        write, fsync = os.write, os.fsync

        def traced_write(fd: int, data: bytes) -> int:
            self._cut()
            n = write(fd, data)
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DSYNC:
                self._durable[_name(fd)] = os.fstat(fd).st_size
            return n

        def traced_sync(fd: int) -> None:
            self._cut()
            fsync(fd)
            if _name(fd) == folder.name:
                self._named = {path.name for path in folder.iterdir()}
            else:
                self._durable[_name(fd)] = os.fstat(fd).st_size

        for module in (ledger.segments, ledger.writer):
            monkeypatch.setattr(module.os, "write", traced_write)
            monkeypatch.setattr(module.os, "fsync", traced_sync)
            monkeypatch.setattr(module.os, "fdatasync", traced_sync)

    def _cut(self) -> None:
        copy = self._folder.with_name(f"cut-{len(self.survived)}")
        copy.mkdir()
        self.survived.append((self.acknowledged, copy))
        for path in self._folder.glob("*.log"):
            sure = self._durable.get(path.name, 0)
            data = path.read_bytes()
            if path.name in self._named or self._rng.random() < 0.5:
                (copy / path.name).open("xb").write(data[: self._rng.randint(sure, len(data))])


def _name(fd: int) -> str:
    return Path(f"/proc/self/fd/{fd}").readlink().name


@pytest.mark.parametrize("seed", range(3))
async def test_what_was_acknowledged_survives_a_power_cut_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
):
    folder, rng, events = tmp_path / "ledger", random.Random(seed), history(seed=seed)
    folder.mkdir()
    with monkeypatch.context() as patches:
        cuts = PowerCuts(folder, patches, rng)
        async with opened(folder, segment_bytes=700) as (journal, _):

            async def append(event: Event) -> None:
                await journal.append(event)
                cuts.acknowledged += 1

            rest = list(events)
            while rest:
                async with anyio.create_task_group() as tg:
                    for _ in range(min(len(rest), rng.randint(1, 6))):
                        tg.start_soon(append, rest.pop(0))
    assert cuts.acknowledged == len(events)
    assert len(cuts.survived) > 20
    for acknowledged, copy in cuts.survived:
        async with opened(copy) as (_, found):
            assert tuple(found) == events[: len(found)]
            assert len(found) >= acknowledged


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 5), st.integers(1, 40), st.integers(500, 4000), st.data())
def test_any_cut_leaves_a_ledger_that_can_be_restored(
    ram: Path, seed: int, n: int, segment_bytes: int, data: st.DataObject
):
    folder = ram / str(len(list(ram.iterdir())))
    events = history(seed=seed)[:n]
    anyio.run(lambda: write(folder, events, segment_bytes=segment_bytes))
    last = current_files(folder)[-1].path
    os.truncate(last, data.draw(st.integers(0, last.stat().st_size)))
    found = reopened(folder)
    assert tuple(found) == events[: len(found)]
    standing(found)


def test_a_frame_that_is_too_large_is_refused():
    builder = FrameBuilder()
    builder.add(TerminalDeclared(rollout_id="r", call_id="x" * MAX_PAYLOAD))
    with pytest.raises(ValueError, match="do not fit into a frame"):
        builder.seal(START)
