"""Operations of a plane: conflicting ones in order, a bounded number at a time, and nothing built on an unknown outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.conformance.faults import running_loop
from dataplane.errors import DataPlaneDown, DataPlaneTimeout
from dataplane.operation import Footprint
from dataplane.private_loop import PrivateLoop
from dataplane.scheduler import MAX_RUNNING, Scheduler

pytestmark = pytest.mark.anyio

WRITE_A = Footprint("p", frozenset("a"), writes=True)
READ_A = Footprint("p", frozenset("a"), writes=False)
FOOTPRINTS = st.builds(
    Footprint,
    st.sampled_from("pq"),
    st.none() | st.frozensets(st.sampled_from("abc"), min_size=1),
    st.booleans(),
)


@asynccontextmanager
async def scheduler(grace: float = 5.0) -> AsyncGenerator[Scheduler]:
    private = PrivateLoop("test")
    await private.start()
    try:
        yield Scheduler(private)
    finally:
        with anyio.CancelScope(shield=True):
            await private.aclose(grace=grace, limit=10, on_exit=lambda: None)


class Gate:
    """Work that begins when it begins, and ends when the test says so. `open` may be called from any thread."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.ended = False
        self._open = threading.Event()

    async def work(self) -> str:
        self.began.set()
        await anyio.to_thread.run_sync(self._open.wait)
        self.ended = True
        return "done"

    def open(self) -> None:
        self._open.set()

    async def reached(self) -> None:
        with anyio.fail_after(10):
            await anyio.to_thread.run_sync(self.began.wait, abandon_on_cancel=True)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(FOOTPRINTS, st.integers(0, 3)), max_size=30))
def test_conflicting_operations_never_overlap_and_keep_their_order(steps: list[tuple[Footprint, int]]) -> None:
    begun: list[int] = []
    running: set[int] = set()

    def work(number: int) -> Callable[[], Awaitable[int]]:
        footprint, naps = steps[number]

        async def body() -> int:
            assert not [other for other in running if footprint.conflicts_with(steps[other][0])], "overlap"
            begun.append(number)
            running.add(number)
            assert len(running) <= MAX_RUNNING
            for _ in range(naps):
                await anyio.lowlevel.checkpoint()
            running.remove(number)
            return number

        return body

    async def main() -> None:
        results: dict[int, int] = {}

        async def run(number: int, operations: Scheduler) -> None:
            results[number] = await operations.run("step", steps[number][0], work(number), timeout=20)

        async with scheduler() as operations, anyio.create_task_group() as tasks:
            for number in range(len(steps)):
                tasks.start_soon(run, number, operations)
        assert results == {number: number for number in range(len(steps))}

    anyio.run(main)
    place = {number: position for position, number in enumerate(begun)}
    for later in range(len(steps)):
        for earlier in range(later):
            if steps[earlier][0].conflicts_with(steps[later][0]):
                assert place[earlier] < place[later]


async def test_a_write_past_its_deadline_is_undone_before_the_next_one_begins() -> None:
    gate, history = Gate(), []

    async def undo() -> None:
        history.append("undone")

    async def following() -> str:
        history.append("next")
        return "next"

    async with scheduler() as operations:
        with pytest.raises(DataPlaneTimeout) as raised:
            await operations.run("put", WRITE_A, gate.work, timeout=0.05, undo=undo)
        assert raised.value.outcome == "unknown"
        assert operations.unsettled == 1
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: operations.run("get", READ_A, following, timeout=10))
            await anyio.sleep(0.05)
            assert history == []
            gate.open()
        assert history == ["undone", "next"]
        assert operations.unsettled == 0


async def test_a_write_that_ends_in_time_is_not_undone() -> None:
    async def undo() -> None:
        raise AssertionError

    gate = Gate()
    gate.open()
    async with scheduler() as operations:
        assert await operations.run("put", WRITE_A, gate.work, timeout=10, undo=undo) == "done"


async def test_an_operation_withdrawn_while_it_waits_never_begins() -> None:
    first, second = Gate(), Gate()
    async with scheduler() as operations, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: operations.run("put", WRITE_A, first.work, timeout=10))
        await first.reached()
        with pytest.raises(DataPlaneTimeout) as raised:
            await operations.run("clear", WRITE_A, second.work, timeout=0.05)
        assert raised.value.outcome == "none"
        with anyio.move_on_after(0.05) as scope:
            await operations.run("clear", WRITE_A, second.work, timeout=10)
        assert scope.cancelled_caught
        first.open()
        await operations.run("get", READ_A, first.work, timeout=10)
    assert not second.began.is_set()


async def test_a_cancelled_write_is_waited_for_and_kept() -> None:
    gate, undone = Gate(), []

    async def undo() -> None:
        undone.append(True)

    async with scheduler() as operations:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: operations.run("put", WRITE_A, gate.work, timeout=10, undo=undo))
                await gate.reached()
                scope.cancel()
                gate.open()
        assert gate.ended
    assert not undone


async def test_a_cancelled_write_is_waited_for_until_its_deadline_only() -> None:
    gate, undone = Gate(), []

    async def undo() -> None:
        undone.append(True)

    async with scheduler() as operations:
        with anyio.fail_after(10), anyio.move_on_after(0.05):
            await operations.run("put", WRITE_A, gate.work, timeout=0.2, undo=undo)
        assert operations.unsettled == 1
        gate.open()
    assert undone


async def test_an_error_of_the_work_is_the_callers() -> None:
    async def fail() -> None:
        raise KeyError("mine")

    async with scheduler() as operations:
        with pytest.raises(KeyError, match="mine"):
            await operations.run("get", READ_A, fail, timeout=10)


async def test_work_that_blocks_its_loop_blocks_nobody_else() -> None:
    async def block() -> None:
        time.sleep(0.3)  # noqa: ASYNC251

    async with scheduler() as operations, running_loop() as gaps:
        with pytest.raises(DataPlaneTimeout):
            await operations.run("get", READ_A, block, timeout=0.15)
        assert len(gaps) > 5


async def test_operations_under_way_at_the_close_end_in_the_grace_or_are_cut() -> None:
    quick, stuck = Gate(), anyio.Event()
    outcomes: list[object] = []

    async def run(operations: Scheduler, work: Callable[[], Awaitable[object]], footprint: Footprint) -> None:
        try:
            outcomes.append(await operations.run("put", footprint, work, timeout=20))
        except DataPlaneDown as error:
            outcomes.append(type(error))

    async with anyio.create_task_group() as tasks:
        async with scheduler(grace=0.5) as operations:
            tasks.start_soon(run, operations, quick.work, WRITE_A)
            tasks.start_soon(run, operations, stuck.wait, Footprint("q", None, writes=True))
            await quick.reached()
            quick.open()
    assert outcomes == ["done", DataPlaneDown]


async def test_a_closed_loop_takes_no_more_operations() -> None:
    async with scheduler() as operations:
        pass
    with pytest.raises(DataPlaneDown):
        await operations.run("get", READ_A, Gate().work, timeout=10)
