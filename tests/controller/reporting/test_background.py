"""A background coroutine outlives its body, and the error that came first is the one that leaves."""

from __future__ import annotations

import anyio
import pytest
from anyio import CancelScope, Event, fail_after

from controller.reporting.background import background

pytestmark = pytest.mark.anyio


class Worker:
    """Runs until stopped, then for a moment longer; fails at the start or at the end if told to."""

    def __init__(self, *, fail_when: str = "") -> None:
        self.stopped = Event()
        self.finished = False
        self.fail_when = fail_when

    async def run(self) -> None:
        if self.fail_when == "running":
            raise OSError("the worker failed")
        await self.stopped.wait()
        await anyio.sleep(0.01)
        self.finished = True
        if self.fail_when == "stopping":
            raise OSError("the worker failed")

    def stop(self) -> None:
        self.stopped.set()


async def test_the_body_ends_and_the_worker_is_waited_for():
    worker = Worker()
    async with background(worker.run, worker.stop):
        assert not worker.finished
    assert worker.finished


async def test_the_body_s_error_leaves_as_itself():
    worker = Worker()
    with pytest.raises(ValueError, match="the body failed"):
        async with background(worker.run, worker.stop):
            raise ValueError("the body failed")
    assert worker.finished


async def test_the_worker_s_error_cancels_the_body_and_leaves_as_itself():
    worker = Worker(fail_when="running")
    with fail_after(5), pytest.raises(OSError, match="the worker failed"):
        async with background(worker.run, worker.stop):
            await anyio.sleep_forever()


async def test_an_error_of_the_stopping_worker_is_a_note_on_the_body_s():
    worker = Worker(fail_when="stopping")
    with pytest.raises(ValueError) as caught:
        async with background(worker.run, worker.stop):
            raise ValueError("the body failed")
    assert caught.value.__notes__ == ["Then: OSError('the worker failed')"]


async def test_an_error_of_the_cancelled_body_is_a_note_on_the_worker_s():
    worker = Worker(fail_when="running")

    async def body() -> None:
        async with background(worker.run, worker.stop):
            try:
                await anyio.sleep_forever()
            finally:
                raise ValueError("clean-up failed")

    with fail_after(5), pytest.raises(OSError) as caught:
        await body()
    assert caught.value.__notes__ == ["Then: ValueError('clean-up failed')"]


async def test_cancellation_of_the_body_does_not_reach_the_worker():
    worker = Worker()
    with CancelScope() as scope:
        async with background(worker.run, worker.stop):
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert worker.finished


async def test_an_error_of_the_worker_is_not_lost_to_a_cancellation():
    worker = Worker(fail_when="stopping")

    async def body() -> None:
        async with background(worker.run, worker.stop):
            scope.cancel()
            await anyio.sleep_forever()

    with pytest.raises(OSError, match="the worker failed"), CancelScope() as scope:
        await body()
