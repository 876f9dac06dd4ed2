"""A daemon thread runs calls in order, and what it is stuck in dies with the process."""

from __future__ import annotations

import sys
import threading

import anyio
import anyio.to_thread
import pytest
from anyio import create_task_group, fail_after, move_on_after, run_process

from controller.reporting.daemon import DaemonThread

pytestmark = pytest.mark.anyio


async def test_calls_run_in_order_and_return_their_results():
    thread = DaemonThread("test")
    ran: list[int] = []
    async with create_task_group() as tasks:
        for index in range(20):
            tasks.start_soon(thread.call, lambda index=index: ran.append(index))
    assert ran == list(range(20))
    assert await thread.call(threading.get_ident) != threading.get_ident()
    thread.close()


async def test_an_error_is_the_caller_s_and_the_thread_goes_on():
    def fail() -> None:
        raise ValueError("no")

    thread = DaemonThread("test")
    with pytest.raises(ValueError, match="no"):
        await thread.call(fail)
    assert await thread.call(lambda: 1) == 1
    thread.close()


async def test_a_cancelled_call_that_has_not_begun_never_runs():
    thread = DaemonThread("test")
    go_on, running = threading.Event(), threading.Event()
    ran: list[str] = []

    def hold() -> None:
        running.set()
        go_on.wait(30)
        ran.append("first")

    with fail_after(10):
        async with create_task_group() as tasks:
            tasks.start_soon(thread.call, hold)
            await anyio.to_thread.run_sync(running.wait)
            with move_on_after(0.05) as scope:
                await thread.call(lambda: ran.append("second"))
            assert scope.cancelled_caught
            go_on.set()
        await thread.call(lambda: ran.append("third"))
    assert ran == ["first", "third"]
    thread.close()


STUCK = """
import anyio, threading
from controller.reporting.daemon import DaemonThread

async def main():
    with anyio.move_on_after(0.2):
        await DaemonThread("stuck").call(threading.Event().wait)

anyio.run(main)
print("left")
"""


async def test_a_stuck_call_does_not_keep_the_process_from_exiting():
    with fail_after(60):
        done = await run_process([sys.executable, "-c", STUCK])
    assert done.stdout == b"left\n"
