"""The report writer keeps order, never makes a producer wait, and loses nothing silently."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
from anyio import CancelScope, Event, create_task_group, fail_after
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.reporting.files import AppendFile
from controller.reporting.writer import ReportWriter, WriteFailed

pytestmark = pytest.mark.anyio


class FileSink:
    """A real file, whose writes can be held as a hung disk holds them."""

    def __init__(self, path: Path, *, held: bool = False) -> None:
        self.path = path
        self.file = AppendFile(path)
        self.go_on = threading.Event()
        self.writing = threading.Event()
        self.writes = 0
        if not held:
            self.go_on.set()

    def open(self) -> None:
        self.file.open()

    def write(self, records: Sequence[str], /) -> None:
        self.writing.set()
        self.go_on.wait(30)
        self.writes += 1
        self.file.write("".join(f"{record}\n" for record in records).encode())

    def close(self) -> None:
        self.file.close()

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()


def full_disk(folder: Path) -> FileSink:
    (folder / "full").symlink_to("/dev/full")
    return FileSink(folder / "full")


async def until_writing(sink: FileSink) -> None:
    with fail_after(10):
        await anyio.to_thread.run_sync(sink.writing.wait)


@given(script=st.lists(st.sampled_from(["a", "b", "flush", "yield"]), max_size=40))
@settings(max_examples=25, deadline=None)
def test_each_file_holds_its_records_in_the_order_they_were_put(tmp_path_factory, script):
    folder = tmp_path_factory.mktemp("writer")

    async def put_all() -> dict[str, list[str]]:
        expected: dict[str, list[str]] = {"a": [], "b": []}
        async with ReportWriter(linger_s=0.001).running() as writer:
            sinks = {name: FileSink(folder / name) for name in expected}
            channels = {name: await writer.open(sink) for name, sink in sinks.items()}
            for index, action in enumerate(script):
                if action in channels:
                    channels[action].put(f"{action}{index}")
                    expected[action].append(f"{action}{index}")
                elif action == "yield":
                    await anyio.sleep(0.001)
                else:
                    await writer.flush()
                    assert {name: sink.lines() for name, sink in sinks.items()} == expected
        return expected

    expected = anyio.run(put_all)
    assert {name: (folder / name).read_text().splitlines() for name in expected} == expected


async def test_records_put_together_are_written_together(tmp_path):
    sink = FileSink(tmp_path / "file")
    async with ReportWriter().running() as writer:
        channel = await writer.open(sink)
        for index in range(1000):
            channel.put(str(index))
    assert sink.lines() == [str(index) for index in range(1000)]
    assert sink.writes == 1


async def test_the_loop_goes_on_while_the_disk_hangs(tmp_path):
    sink = FileSink(tmp_path / "file", held=True)
    async with ReportWriter(linger_s=0).running() as writer:
        channel = await writer.open(sink)
        channel.put("first")
        await until_writing(sink)
        channel.put("second")
        await checkpoint()
        assert sink.lines() == []
        sink.go_on.set()
    assert sink.lines() == ["first", "second"]


async def test_a_body_cancelled_while_a_write_is_under_way_loses_nothing(tmp_path):
    sink = FileSink(tmp_path / "file", held=True)
    with fail_after(10), CancelScope() as scope:
        async with ReportWriter(linger_s=0).running() as writer:
            channel = await writer.open(sink)
            channel.put("before")
            await until_writing(sink)
            try:
                scope.cancel()
                await anyio.sleep_forever()
            finally:
                channel.put("from the clean-up")
                sink.go_on.set()
    assert scope.cancelled_caught
    assert sink.lines() == ["before", "from the clean-up"]


async def test_a_full_disk_ends_the_run_with_one_error_that_names_the_file(tmp_path):
    async def body() -> None:
        async with ReportWriter(linger_s=0).running() as writer:
            channel = await writer.open(full_disk(tmp_path))
            channel.put("lost")
            channel.put("lost too")
            await anyio.sleep_forever()

    with fail_after(10), pytest.raises(WriteFailed) as caught:
        await body()
    assert caught.value.path == tmp_path / "full"
    assert caught.value.lost == 2
    assert "No space left on device" in str(caught.value)


async def test_a_disk_found_full_at_the_very_end_is_still_an_error(tmp_path):
    async def body() -> None:
        async with ReportWriter().running() as writer:
            channel = await writer.open(full_disk(tmp_path))
            channel.put("lost")

    with pytest.raises(WriteFailed, match="No space left"):
        await body()


async def test_after_a_failed_write_the_dying_run_s_records_are_discarded(tmp_path):
    async def body() -> None:
        async with ReportWriter(linger_s=0).running() as writer:
            channel = await writer.open(full_disk(tmp_path))
            channel.put("lost")
            try:
                await anyio.sleep_forever()
            finally:
                channel.put("from the clean-up")

    with fail_after(10), pytest.raises(WriteFailed) as caught:
        await body()
    assert caught.value.lost == 1
    assert not hasattr(caught.value, "__notes__")


async def test_a_flush_out_of_cancellation_s_reach_sees_the_failure(tmp_path):
    async def body() -> None:
        async with ReportWriter(linger_s=60).running() as writer:
            channel = await writer.open(full_disk(tmp_path))
            channel.put("lost")
            with CancelScope(shield=True):
                with pytest.raises(WriteFailed):
                    await writer.flush()
                with pytest.raises(WriteFailed):
                    await writer.flush()

    with fail_after(10), pytest.raises(WriteFailed) as caught:
        await body()
    assert caught.value.path == tmp_path / "full"


async def test_a_hung_disk_does_not_hold_up_the_end_of_the_run(tmp_path):
    sink = FileSink(tmp_path / "file", held=True)

    async def body() -> None:
        async with ReportWriter(linger_s=0, close_timeout_s=0.1).running() as writer:
            channel = await writer.open(sink)
            channel.put("stuck")
            await until_writing(sink)

    with fail_after(10), pytest.raises(WriteFailed, match=r"file: no answer from the disk for 0.1 s; 1 record"):
        await body()
    sink.go_on.set()


async def test_a_disk_that_does_not_keep_up_is_an_error_before_memory_runs_out(tmp_path):
    sink = FileSink(tmp_path / "file", held=True)

    async def body() -> None:
        async with ReportWriter(linger_s=0, max_pending=10).running() as writer:
            channel = await writer.open(sink)
            try:
                for index in range(11):
                    channel.put(str(index))
            finally:
                sink.go_on.set()

    with fail_after(10), pytest.raises(WriteFailed, match="does not keep up"):
        await body()
    assert sink.lines() == [str(index) for index in range(10)]


async def test_a_record_after_the_end_is_refused(tmp_path):
    async with ReportWriter().running() as writer:
        channel = await writer.open(FileSink(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="after the report writer was closed"):
        channel.put("late")


async def test_a_file_that_cannot_be_opened_is_an_error_at_once(tmp_path):
    (tmp_path / "not-a-folder").touch()
    with pytest.raises(WriteFailed, match="not-a-folder/file"):
        async with ReportWriter().running() as writer:
            await writer.open(FileSink(tmp_path / "not-a-folder" / "file"))


async def test_flushes_of_several_tasks_each_return_with_their_records_written(tmp_path):
    sink = FileSink(tmp_path / "file")
    done = Event()

    async def put_and_flush(name: str) -> None:
        channel.put(name)
        await writer.flush()
        assert name in sink.lines()

    with fail_after(10):
        async with ReportWriter(linger_s=60).running() as writer:
            channel = await writer.open(sink)
            async with create_task_group() as tasks:
                for index in range(20):
                    tasks.start_soon(put_and_flush, f"task {index}")
            done.set()
    assert done.is_set()
    assert len(sink.lines()) == 20
