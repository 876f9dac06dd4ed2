"""The task group that ends its tasks gradually: as anyio's in what it waits for, raises and cancels, and not all at once."""

from __future__ import annotations

import gc
from collections import Counter

import anyio
import anyio.lowlevel
import pytest

from controller.foreign import await_foreign
from controller.gradual import GradualTaskGroup, gradual_task_group

pytestmark = pytest.mark.anyio


class Sleepers:
    """Tasks that sleep until they are cancelled, and note in which turn of the loop they were."""

    def __init__(self) -> None:
        self.turn = 0
        self.cancelled_in: list[int] = []

    async def count_turns(self) -> None:
        while True:
            await anyio.lowlevel.checkpoint()
            self.turn += 1

    async def sleep(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self.cancelled_in.append(self.turn)

    def start(self, group: GradualTaskGroup, number: int) -> None:
        for _ in range(number):
            group.start_soon(self.sleep)


@pytest.fixture
async def sleepers():
    sleepers = Sleepers()
    async with anyio.create_task_group() as tg:
        tg.start_soon(sleepers.count_turns)
        yield sleepers
        tg.cancel_scope.cancel()


async def test_it_is_left_when_all_tasks_have_ended() -> None:
    ended: list[int] = []

    async def end(number: int) -> None:
        await anyio.sleep(0.01 * number)
        ended.append(number)

    async with gradual_task_group() as group:
        for number in range(4):
            group.start_soon(end, number)
    assert ended == [0, 1, 2, 3]


@pytest.mark.parametrize("started", [True, False])
async def test_a_cancellation_ends_its_tasks_in_different_turns_of_the_loop(sleepers: Sleepers, started: bool) -> None:
    with anyio.CancelScope() as scope:
        async with gradual_task_group() as group:
            sleepers.start(group, 100)
            if started:
                await anyio.sleep(0.01)
            scope.cancel()
    assert scope.cancelled_caught
    # One that had not begun ends at its first await.
    assert len(sleepers.cancelled_in) == 100
    assert max(Counter(sleepers.cancelled_in).values()) <= 2


@pytest.mark.parametrize("who", ["task", "body"])
async def test_an_error_of_a_task_or_the_body_ends_the_others_and_is_raised(sleepers: Sleepers, who: str) -> None:
    async def fail() -> None:
        await anyio.sleep(0.01)
        raise KeyError("it failed")

    async def play() -> None:
        async with gradual_task_group() as group:
            sleepers.start(group, 10)
            if who == "task":
                group.start_soon(fail)
            else:
                await fail()

    with pytest.raises(BaseExceptionGroup) as caught:
        await play()
    assert caught.group_contains(KeyError, match="it failed")
    assert len(sleepers.cancelled_in) == 10


async def test_tasks_that_were_cancelled_leave_nothing_to_the_collector() -> None:
    async def play() -> None:
        await await_foreign(anyio.sleep_forever(), "a rollout", on_cancel=lambda: None)

    gc.collect()
    gc.disable()
    try:
        with anyio.CancelScope() as scope:
            async with gradual_task_group() as group:
                for _ in range(100):
                    group.start_soon(play)
                await anyio.sleep(0.01)
                scope.cancel()
        await anyio.sleep(0.01)
        assert gc.collect() < 100
    finally:
        gc.enable()
