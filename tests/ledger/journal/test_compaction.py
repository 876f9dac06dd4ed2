"""Compaction keeps what a ledger goes on from, and bounds the rest; a crash in the middle of it loses nothing."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ledger.compaction
from ledger.audit import audit
from ledger.compaction import compact, fold
from ledger.errors import JournalCorrupt, LedgerError
from ledger.events import CheckpointMarked, Compacted, GroupDispatched, RolloutReplaced
from ledger.journal import Journal
from ledger.segments import all_files, current_files
from tests.ledger.journal.histories import history, standing
from tests.ledger.journal.opened import events_in, opened, write

pytestmark = pytest.mark.anyio


@given(st.integers(0, 9), st.data())
def test_a_folded_log_stands_where_the_whole_one_does(seed: int, data: st.DataObject):
    """Wherever it is divided, also when what was folded is folded again."""
    events = history(seed=seed)
    cut = data.draw(st.integers(0, len(events)))
    folded = fold(events[:cut])
    assert standing(folded) == standing(events[:cut])
    assert standing([*folded, *events[cut:]]) == standing(events)
    again = data.draw(st.integers(cut, len(events)))
    twice = fold([*folded, *events[cut:again]])
    assert twice == fold(events[:again])


def test_what_is_left_is_bounded_by_what_is_live():
    events = history(groups=3, live=0)
    assert fold(events) == [Compacted(**ends(events), last_group="g2")]
    assert len(fold(history(groups=0, live=1))) == 1 + len(history(groups=0, live=1))


def ends(events) -> dict[str, int]:
    account = standing(events)["account"]
    return {end: getattr(account, end) for end in ("trained", "evicted", "dropped", "aborted")}


def test_an_impossible_log_is_not_folded():
    with pytest.raises(LedgerError):
        fold([e for e in history() if not isinstance(e, GroupDispatched)])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("journals") / "ledger"
    anyio.run(lambda: write(folder, history(), segment_bytes=3000, history_bytes=1 << 40))
    assert len(current_files(folder)) > 5
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "ledger")


def size_of(folder: Path) -> int:
    return sum(segment.path.stat().st_size for segment in all_files(folder))


@pytest.mark.parametrize("before", [2, 4, 6])
def test_only_segments_before_the_given_one_give_way(folder: Path, before: int):
    segments = current_files(folder)
    path = compact(folder, before=before, keep_bytes=0)
    assert path == folder / f"compact-{before - 1:06d}.log"
    assert [s.path for s in current_files(folder)] == [path, *(s.path for s in segments[before - 1 :])]
    assert standing(events_in(folder)) == standing(history())
    assert audit(folder).sound


def test_no_more_gives_way_than_must(folder: Path):
    segments, size = current_files(folder), size_of(folder)
    assert compact(folder, before=99, keep_bytes=size) is None
    path = compact(folder, before=99, keep_bytes=size - 1)
    assert [s.path for s in current_files(folder)] == [path, *(s.path for s in segments[1:])]


def test_step_by_step_it_comes_to_the_same(folder: Path):
    last = current_files(folder)[-1].number
    for before in range(2, last + 1):
        compact(folder, before=before, keep_bytes=0)
        assert standing(events_in(folder)) == standing(history())
    assert len(all_files(folder)) == 2
    assert compact(folder, before=last, keep_bytes=0) is None


class Crash(BaseException):
    pass


STEPS = ("open", "write", "fsync", "replace", "sync_folder", "unlink")


def crashing_at(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies before this step."""

    def crash(*_: Any, **__: Any) -> None:
        raise Crash

    module = ledger.compaction
    targets: dict[str, tuple[Any, str]] = {
        "open": (module.os, "open"),
        "write": (module, "write_all"),
        "fsync": (module.os, "fsync"),
        "replace": (module.Path, "replace"),
        "sync_folder": (module, "sync_folder"),
        "unlink": (module.Path, "unlink"),
    }
    monkeypatch.setattr(*targets[step], crash)
    if step != "unlink":
        # A dead process does not clean up either.
        monkeypatch.setattr(module.Path, "unlink", lambda *_, **__: None)


@pytest.mark.parametrize("step", STEPS)
async def test_a_crash_before_any_step_leaves_a_whole_journal(folder: Path, step: str, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patches:
        crashing_at(step, patches)
        with pytest.raises(Crash):
            compact(folder, before=5, keep_bytes=0)
    assert standing(events_in(folder)) == standing(history())
    assert audit(folder).sound
    async with opened(folder) as (journal, events):
        assert standing(events) == standing(history())
        await journal.append(CheckpointMarked(step=9))
    assert not list(folder.glob("*.writing"))
    assert {s.path for s in all_files(folder)} == {s.path for s in current_files(folder)}


async def test_originals_are_not_removed_for_a_compacted_file_that_is_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patches:
        crashing_at("unlink", patches)
        with pytest.raises(Crash):
            compact(folder, before=5, keep_bytes=0)
    compacted = current_files(folder)[0].path
    data = bytearray(compacted.read_bytes())
    data[-5] ^= 1
    compacted.write_bytes(data)
    before = all_files(folder)
    with pytest.raises(JournalCorrupt, match=compacted.name):
        await Journal.open(folder)
    assert all_files(folder) == before


def test_a_folder_that_was_listed_in_the_middle_of_a_compaction_is_listed_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Listing is not atomic: it can miss the new file and the removed ones."""
    compact(folder, before=4, keep_bytes=0)
    listings = [all_files(folder)[1:], all_files(folder)]
    monkeypatch.setattr("ledger.segments.all_files", lambda _: listings.pop(0))
    assert current_files(folder)[0].compacted


async def test_a_full_disk_leaves_the_journal_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    before = all_files(folder)
    with monkeypatch.context() as patches:
        patches.setattr(ledger.compaction, "write_all", full)
        with pytest.raises(OSError, match="No space left"):
            compact(folder, before=5, keep_bytes=0)
    assert all_files(folder) == before
    assert not list(folder.glob("*.writing"))


async def test_a_checkpoint_compacts_what_is_beyond_the_history_to_keep(tmp_path: Path):
    async with opened(tmp_path, segment_bytes=2000, history_bytes=6000) as (journal, _):
        for event in history():
            if not isinstance(event, CheckpointMarked):
                await journal.append(event)
        before = size_of(tmp_path)
        await journal.append(CheckpointMarked(step=1))
    assert before > 12_000 > size_of(tmp_path) > 6000 - 2000
    assert standing(events_in(tmp_path)) == standing(history())
    assert audit(tmp_path).sound


async def test_a_journal_of_any_length_stays_small(tmp_path: Path):
    """Many groups, one after the other, each behind a checkpoint: what is on the disk does not grow."""
    sizes: list[int] = []
    again = 0
    for n in range(12):
        async with opened(tmp_path, segment_bytes=2000, history_bytes=4000) as (journal, _):
            for event in history(groups=3, live=0, seed=n):
                await journal.append(event)
                again += isinstance(event, RolloutReplaced) and event.group_id != "e0"  # held out, in no account
        sizes.append(size_of(tmp_path))
    assert max(sizes) < 4000 + 2 * 2000 < sum(sizes) / 3, sizes
    assert standing(events_in(tmp_path))["account"].ended == 12 * 9 + again


async def test_the_agents_are_not_kept_waiting_by_a_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go = threading.Event()
    begun = threading.Event()

    def slow(*args: Any, **options: Any) -> Path | None:
        begun.set()
        assert go.wait(20)
        return compact(*args, **options)

    monkeypatch.setattr("ledger.journal.compact", slow)
    async with opened(tmp_path, segment_bytes=1000, history_bytes=0) as (journal, _):
        events = iter(history())
        for event in events:
            await journal.append(event)
            if isinstance(event, CheckpointMarked):
                break
        assert await anyio.to_thread.run_sync(begun.wait, 20)
        for event in events:
            await journal.append(event)
        go.set()
    assert standing(events_in(tmp_path)) == standing(history())
    assert any(s.compacted for s in current_files(tmp_path)), "closing waits for it"


async def test_a_failing_compaction_is_logged_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("ledger.journal.compact", fails)
    await write(tmp_path, history(), segment_bytes=1000, history_bytes=0)
    assert events_in(tmp_path) == list(history())
    assert "compaction failed: [Errno 28] No space left on device" in caplog.text
