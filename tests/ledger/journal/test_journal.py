"""Appending: what returns is durable, in order and shared; what cannot be written is said, at once and for good."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ledger.segments
from ledger.errors import JournalBusy, JournalFailed
from ledger.events import CheckpointMarked, Event, TerminalDeclared
from ledger.frames import FRAME_BYTES
from ledger.journal import Journal
from ledger.segments import JournalReader, all_files, current_files
from tests.ledger.journal.histories import history
from tests.ledger.journal.opened import events_in, opened, write

pytestmark = pytest.mark.anyio


def numbered(n: int, size: int = 1) -> TerminalDeclared:
    return TerminalDeclared(rollout_id="r", call_id=f"{n:0{size}d}")


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk answers only once this is set."""
    go = threading.Event()
    real = os.write

    def write(fd: int, data: Any) -> int:
        assert go.wait(20)
        return real(fd, data)

    monkeypatch.setattr(ledger.segments.os, "write", write)
    yield go
    go.set()


async def test_events_come_back_in_order(tmp_path: Path):
    await write(tmp_path / "ledger", history())
    async with opened(tmp_path / "ledger") as (_, events):
        assert tuple(events) == history()


async def test_a_reopened_journal_goes_on(tmp_path: Path):
    for start in range(3):
        await write(tmp_path, history()[start::3])
    expected = [e for start in range(3) for e in history()[start::3]]
    assert events_in(tmp_path) == expected
    assert len(current_files(tmp_path)) == 3


async def test_opening_alone_writes_no_segment(tmp_path: Path):
    for _ in range(3):
        async with opened(tmp_path) as (_, events):
            assert events == []
    assert all_files(tmp_path) == []


async def test_an_event_is_on_the_disk_when_its_append_returns(tmp_path: Path):
    async with opened(tmp_path) as (journal, _):
        for n, event in enumerate(history(), start=1):
            await journal.append(event)
            assert len(events_in(tmp_path)) == n


async def test_events_take_their_places_in_the_order_of_the_calls_and_share_frames(tmp_path: Path):
    async with opened(tmp_path) as (journal, _):
        async with anyio.create_task_group() as tg:
            for n in range(1000):
                tg.start_soon(journal.append, numbered(n))
    assert [e.call_id for e in events_in(tmp_path)] == [str(n) for n in range(1000)]
    assert len(list(JournalReader(current_files(tmp_path)))) == 1


async def test_a_frame_stays_small_enough_to_be_decoded_quickly(tmp_path: Path):
    async with opened(tmp_path) as (journal, _):
        async with anyio.create_task_group() as tg:
            for n in range(100):
                tg.start_soon(journal.append, numbered(n, size=FRAME_BYTES // 10))
    frames = [found.frame for found in JournalReader(current_files(tmp_path))]
    assert [len(frame.events) for frame in frames] == [10] * 10


async def test_nothing_is_acknowledged_before_the_disk_has_it(tmp_path: Path, stuck: threading.Event):
    async with opened(tmp_path) as (journal, _):
        returned = []

        async def append(n: int) -> None:
            await journal.append(numbered(n))
            returned.append(n)

        async with anyio.create_task_group() as tg:
            for n in range(3):
                tg.start_soon(append, n)
            await anyio.wait_all_tasks_blocked()
            assert returned == []
            stuck.set()
        assert sorted(returned) == [0, 1, 2]


async def test_without_durability_the_disk_is_not_waited_for_until_the_end(tmp_path: Path, stuck: threading.Event):
    async with opened(tmp_path, durability="none") as (journal, _):
        for event in history():
            await journal.append(event)
        assert events_in(tmp_path) == []
        stuck.set()
    assert tuple(events_in(tmp_path)) == history()


async def test_without_durability_what_waits_for_the_disk_is_bounded(tmp_path: Path, stuck: threading.Event):
    async with opened(tmp_path, durability="none") as (journal, _):
        appended, waiting = 0, False
        while not waiting and appended < 400:
            appended += 1
            with anyio.move_on_after(0.3) as scope:
                await journal.append(numbered(appended, size=FRAME_BYTES))
            waiting = scope.cancelled_caught
        assert 200 < appended < 300
        stuck.set()
    assert len(events_in(tmp_path)) == appended


async def test_a_cancellation_ends_the_waiting_and_not_the_event(tmp_path: Path, stuck: threading.Event):
    async with opened(tmp_path) as (journal, _):
        async with anyio.create_task_group() as tg:
            for n in range(5):
                tg.start_soon(journal.append, numbered(n))
            await anyio.wait_all_tasks_blocked()
            tg.cancel_scope.cancel()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await journal.append(numbered(5))
            raise AssertionError("a cancelled append returned")
        stuck.set()
        await journal.append(numbered(6))
    assert [e.call_id for e in events_in(tmp_path)] == list("0123456")


async def test_others_still_learn_of_their_events_when_one_who_waits_is_cancelled(tmp_path: Path, stuck):
    async with opened(tmp_path) as (journal, _):
        returned = []

        async def append(n: int, scope: anyio.CancelScope) -> None:
            with scope:
                await journal.append(numbered(n))
                returned.append(n)

        scopes = [anyio.CancelScope() for _ in range(6)]
        async with anyio.create_task_group() as tg:
            for n, scope in enumerate(scopes):
                tg.start_soon(append, n, scope)
            await anyio.wait_all_tasks_blocked()
            for scope in scopes[::2]:
                scope.cancel()
            await anyio.wait_all_tasks_blocked()
            stuck.set()
        assert sorted(returned) == [1, 3, 5]


async def test_two_writers_never_share_a_folder(tmp_path: Path):
    async with opened(tmp_path) as (journal, _):
        with pytest.raises(JournalBusy, match="another process is writing it"):
            await Journal.open(tmp_path)
        await journal.append(numbered(0))
    async with opened(tmp_path) as (_, events):
        assert events == [numbered(0)]


async def test_a_cancelled_opening_leaves_the_folder_free(tmp_path: Path):
    with anyio.CancelScope() as scope:
        scope.cancel()
        await Journal.open(tmp_path)
    assert scope.cancelled_caught
    async with opened(tmp_path):
        pass


async def test_closing_writes_what_was_appended_and_refuses_the_rest(tmp_path: Path, stuck: threading.Event):
    journal, _ = await Journal.open(tmp_path)
    async with anyio.create_task_group() as tg:
        for n in range(5):
            tg.start_soon(journal.append, numbered(n))
        await anyio.wait_all_tasks_blocked()
        tg.start_soon(journal.aclose)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(JournalFailed, match="it is closed"):
            await journal.append(numbered(5))
        stuck.set()
    assert len(events_in(tmp_path)) == 5
    await journal.aclose()


async def test_closing_waits_no_longer_than_it_may_and_is_not_cancelled(tmp_path: Path, stuck: threading.Event):
    journal, _ = await Journal.open(tmp_path, close_timeout_s=0.2)
    with anyio.move_on_after(0.05):
        await journal.append(numbered(0))
    with anyio.fail_after(10), anyio.CancelScope() as scope:
        scope.cancel()
        with pytest.raises(JournalFailed, match=r"segment-000001.log: no answer from the disk for 0.2 s"):
            await journal.aclose()
    stuck.set()


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """A full disk, as far as the kernel lets a test have one: writes beyond `size` fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def append_until_it_fails(journal: Journal, acknowledged: list[Event]) -> None:
    for event in history():
        await journal.append(event)
        acknowledged.append(event)
    with anyio.fail_after(10):  # Without durability it comes to light when the disk was tried.
        while True:
            await journal.append(numbered(0))
            await anyio.sleep(0.01)


@pytest.mark.parametrize("durability", ["batch", "none"])
@pytest.mark.parametrize("size", [0, 1, 100, 5_000, 5_001])
async def test_after_a_failed_write_every_append_fails_at_once_and_nothing_acknowledged_is_lost(
    tmp_path: Path, size: int, durability: str
):
    journal, _ = await Journal.open(tmp_path, durability=durability)
    acknowledged: list[Event] = []
    with files_no_larger_than(size):
        with pytest.raises(JournalFailed) as failed:
            await append_until_it_fails(journal, acknowledged)
    assert failed.value.path.name == "segment-000001.log"
    assert os.strerror(errno.EFBIG) in str(failed.value)
    with anyio.CancelScope() as scope:
        scope.cancel()
        with pytest.raises(JournalFailed):  # Before it could be cancelled.
            await journal.append(numbered(1))
    await journal.aclose()
    async with opened(tmp_path) as (again, events):
        if durability == "batch":
            assert events[: len(acknowledged)] == acknowledged
        assert events == list(history()[: len(events)])
        await again.append(numbered(2))
    assert events_in(tmp_path) == [*events, numbered(2)]


async def test_all_who_wait_for_a_failed_write_are_told(tmp_path: Path, stuck: threading.Event):
    journal, _ = await Journal.open(tmp_path)
    failures: list[JournalFailed] = []

    async def append(n: int) -> None:
        with pytest.raises(JournalFailed) as failed:
            await journal.append(numbered(n, size=FRAME_BYTES // 4))
        failures.append(failed.value)

    with files_no_larger_than(100):
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tg:
                for n in range(20):  # Five frames.
                    tg.start_soon(append, n)
                await anyio.wait_all_tasks_blocked()
                stuck.set()
    assert len({id(f) for f in failures}) == 20, "an exception that is raised twice mixes up its tracebacks"
    await journal.aclose()


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        await Journal.open(tmp_path / "file" / "ledger")


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 3), max_size=30), st.integers(100, 3000))
def test_segments_follow_each_other_at_their_size(ram: Path, pauses: list[int], size: int):
    folder = ram / str(len(list(ram.iterdir())))
    events = history()[: len(pauses)]

    async def play() -> None:
        async with opened(folder, segment_bytes=size) as (journal, _):
            async with anyio.create_task_group() as tg:
                for event, pause in zip(events, pauses, strict=True):
                    tg.start_soon(journal.append, event)
                    if pause:
                        await anyio.wait_all_tasks_blocked()

    anyio.run(play)
    assert tuple(events_in(folder)) == events
    for segment in current_files(folder)[:-1]:
        assert segment.path.stat().st_size >= size


async def test_a_checkpoint_is_an_event_like_any_other(tmp_path: Path):
    await write(tmp_path, [CheckpointMarked(step=3)])
    assert events_in(tmp_path) == [CheckpointMarked(step=3)]
