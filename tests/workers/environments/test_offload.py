from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest

from workers.environments.offload import WorkerDied, offload, stop_idle_workers

pytestmark = pytest.mark.anyio

HANG_GUARD_S = 60


def add(a: int, b: int) -> int:
    return a + b


def fail(text: str) -> None:
    raise KeyError(text)


class Stubborn(Exception):
    """Pickles, but cannot be loaded again."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


def fail_stubbornly() -> None:
    raise Stubborn(3, "the scorer's own words")


def unpicklable() -> object:
    return lambda: None


def end_process() -> None:
    os._exit(3)


def spin(pid_file: str) -> None:
    write_pid(pid_file)
    while True:
        pass


def hold_the_interpreter(pid_file: str) -> int:
    write_pid(pid_file)
    return 9**9**9**9


def write_pid(pid_file: str) -> None:
    """Atomically, so that a reader never sees an empty file."""
    draft = Path(pid_file + ".draft")
    draft.write_text(str(os.getpid()))
    draft.rename(pid_file)


async def pid_in(path: Path) -> int:
    with anyio.fail_after(HANG_GUARD_S):
        while not path.exists():
            await anyio.sleep(0.01)
    return int(path.read_text())


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while is_running(pid):
        multiprocessing.active_children()  # reaps those that have ended
        assert time.monotonic() < deadline, f"process {pid} is still running"
        time.sleep(0.02)


async def test_a_result_comes_back() -> None:
    assert await offload(add, 2, 3, timeout_s=30) == 5


async def test_it_runs_in_another_process_that_is_kept_for_the_next_call() -> None:
    first, second = await offload(os.getpid, timeout_s=30), await offload(os.getpid, timeout_s=30)
    assert first == second != os.getpid()


async def test_its_exception_comes_back_with_the_traceback_and_costs_no_process() -> None:
    before = await offload(os.getpid, timeout_s=30)
    with pytest.raises(KeyError, match="no such key") as caught:
        await offload(fail, "no such key", timeout_s=30)
    assert "in fail" in "".join(caught.value.__notes__)
    assert await offload(os.getpid, timeout_s=30) == before


async def test_an_exception_that_cannot_travel_comes_back_as_text() -> None:
    with pytest.raises(RuntimeError, match="the scorer's own words"):
        await offload(fail_stubbornly, timeout_s=30)


async def test_what_cannot_be_pickled_is_an_error_and_not_a_hang() -> None:
    with anyio.fail_after(HANG_GUARD_S):
        with pytest.raises(Exception, match="pickle"):
            await offload(lambda: 1, timeout_s=30)
        with pytest.raises(Exception, match="pickle"):
            await offload(unpicklable, timeout_s=30)
        assert await offload(add, 1, 1, timeout_s=30) == 2


@pytest.mark.parametrize("endless", [spin, hold_the_interpreter])
async def test_a_runaway_function_is_killed_when_its_time_is_up(endless, tmp_path: Path) -> None:
    with anyio.fail_after(HANG_GUARD_S), pytest.raises(TimeoutError, match=rf"{endless.__name__} ran longer than 1 s"):
        await offload(endless, str(tmp_path / "pid"), timeout_s=1)
    assert not is_running(await pid_in(tmp_path / "pid"))
    assert await offload(add, 1, 1, timeout_s=30) == 2


async def test_the_loop_goes_on_while_a_function_holds_its_interpreter(tmp_path: Path) -> None:
    with anyio.fail_after(HANG_GUARD_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offload_for_ever, str(tmp_path / "pid"))
            await pid_in(tmp_path / "pid")
            for _ in range(20):
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()


async def offload_for_ever(pid_file: str) -> None:
    await offload(hold_the_interpreter, pid_file, timeout_s=HANG_GUARD_S)


async def test_a_cancelled_call_kills_its_process(tmp_path: Path) -> None:
    with anyio.fail_after(HANG_GUARD_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offload_for_ever, str(tmp_path / "pid"))
            pid = await pid_in(tmp_path / "pid")
            tasks.cancel_scope.cancel()
    assert not is_running(pid)


async def test_calls_cancelled_while_their_workers_start_leave_none_running(tmp_path: Path) -> None:
    """More calls than there are slots, cancelled at once: those that had begun to start a process must end it."""
    with anyio.fail_after(HANG_GUARD_S):
        async with anyio.create_task_group() as tasks:
            for index in range(2 * (os.cpu_count() or 1)):
                tasks.start_soon(offload_for_ever, str(tmp_path / f"pid{index}"))
            await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    assert not list(tmp_path.iterdir())
    assert await offload(add, 1, 1, timeout_s=30) == 2


async def test_a_process_that_ends_by_itself_is_replaced() -> None:
    with pytest.raises(WorkerDied, match="end_process"):
        await offload(end_process, timeout_s=30)
    assert await offload(add, 1, 1, timeout_s=30) == 2


async def test_there_are_never_more_processes_than_cpus() -> None:
    pids: set[int] = set()

    async def one() -> None:
        pids.add(await offload(os.getpid, timeout_s=30))

    with anyio.fail_after(HANG_GUARD_S):
        async with anyio.create_task_group() as tasks:
            for _ in range(4 * (os.cpu_count() or 1)):
                tasks.start_soon(one)
    assert 1 <= len(pids) <= (os.cpu_count() or 1)


def test_idle_workers_end_with_their_loop() -> None:
    async def main() -> int:
        return await offload(os.getpid, timeout_s=30)

    pid = anyio.run(main)
    gc.collect()
    wait_until_gone(pid)


async def test_stopping_idle_workers_ends_their_processes() -> None:
    pid = await offload(os.getpid, timeout_s=30)
    await stop_idle_workers()
    assert not is_running(pid)


PROGRAM = """
import sys, anyio
from tests.workers.environments.test_offload import add, spin, write_pid
from workers.environments.offload import offload

async def main():
    await offload(write_pid, sys.argv[1] + ".idle", timeout_s=30)
    if len(sys.argv) > 2:
        await offload(spin, sys.argv[1], timeout_s=float(sys.argv[2]))

if __name__ == "__main__":
    anyio.run(main)
"""


# Handles Ctrl-C as the controller does. Without a handler of the loop's own, a signal that comes just before the loop waits
# is seen only when the loop wakes up next.
INTERRUPTIBLE = """
import signal, sys, anyio
from tests.workers.environments.test_offload import spin
from workers.environments.offload import offload

async def main():
    async with anyio.create_task_group() as tg:
        with anyio.open_signal_receiver(signal.SIGINT) as signals:
            tg.start_soon(lambda: offload(spin, sys.argv[1], timeout_s=float(sys.argv[2])))
            async for _ in signals:
                tg.cancel_scope.cancel()
    print("interrupted", file=sys.stderr)

if __name__ == "__main__":
    anyio.run(main)
"""


def program(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], cwd=Path(__file__).parents[3])


def test_a_program_that_ends_leaves_no_process(tmp_path: Path) -> None:
    assert program(str(tmp_path / "pid")).wait(HANG_GUARD_S) == 0
    wait_until_gone(int((tmp_path / "pid.idle").read_text()))


async def test_a_program_that_is_killed_leaves_a_runaway_function_no_longer_than_its_time(tmp_path: Path) -> None:
    parent = program(str(tmp_path / "pid"), "2")
    try:
        pid = await pid_in(tmp_path / "pid")
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(HANG_GUARD_S)
    wait_until_gone(pid)


def test_ctrl_c_ends_a_program_and_its_workers_without_noise(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, str(tmp_path / "pid"), "60"],
        cwd=Path(__file__).parents[3],
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + HANG_GUARD_S
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(parent.pid, signal.SIGINT)
        _, stderr = parent.communicate(timeout=HANG_GUARD_S)
    finally:
        parent.kill()
    wait_until_gone(int((tmp_path / "pid").read_text()))
    assert stderr == b"interrupted\n", "the worker printed a traceback of its own"
