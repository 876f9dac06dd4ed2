"""What one late answer of the data plane may cost, in whole runs on fakes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from controller.config.schema import Config, EnvironmentConfig, ModelConfig, RolloutConfig, RunConfig
from dataplane.errors import DataPlaneTimeout
from dataplane.schema import STAGING, TRAIN
from tests.fakes.clock import run_virtually
from tests.fakes.environment import Talker
from tests.fakes.house import FakeHouse, open_house

CONFIG = Config(
    run=RunConfig(dir="runs/fake", steps=4),
    model=ModelConfig(path="models/none"),
    environment=EnvironmentConfig(name="talker"),
    rollout=RolloutConfig(groups_per_step=2, group_size=2, max_tokens=16),
)


class Late:
    """The operation has no answer in time, from the `first`th to the `last`th time (counted from 1)."""

    def __init__(self, operation: str, partition: str, first: int, last: int) -> None:
        self._what = (operation, partition)
        self._times = range(first, last + 1)
        self._count = 0
        self.keys: list[set[str]] = []
        """Of each time."""

    def __call__(self, operation: str, partition: str, keys: Sequence[str]) -> None:
        if (operation, partition) == self._what:
            self._count += 1
            self.keys.append(set(keys))
            if self._count in self._times:
                raise DataPlaneTimeout(operation, partition=partition, seconds=30, outcome="none")


async def play(late: Late) -> FakeHouse:
    async with open_house(CONFIG, Talker(100)) as house:
        house.store.refuses = late
        await house.play()
        return house


def test_trained_rows_that_are_not_cleared_in_time_are_cleared_with_those_of_the_next_step() -> None:
    late = Late("clear", TRAIN, 2, 2)
    house = run_virtually(play, late)
    assert house.error is None
    assert house.run.state.step == 4
    assert late.keys[1] < late.keys[2]
    assert not any(house.swept.values())


def test_trained_rows_that_are_never_cleared_are_swept_when_the_run_ends() -> None:
    house = run_virtually(play, Late("clear", TRAIN, 1, 100))
    assert house.error is None
    assert (house.swept[STAGING], house.swept[TRAIN]) == (0, len(house.trained.rows))
    assert not house.left


@pytest.mark.parametrize("times", [1, 2])
def test_a_put_that_is_late_is_made_again(times: int) -> None:
    house = run_virtually(play, Late("put", TRAIN, 1, times))
    assert house.error is None
    assert house.run.finalizers.rejections == {}
