"""The interpreter's settings during a run, and that rollouts leave nothing which only a full collection would find."""

from __future__ import annotations

import gc
import sys

import anyio

from controller.config.schema import Config, EnvironmentConfig, ModelConfig, RolloutConfig, RunConfig
from controller.interpreter import COLLECT_EVERY, quiet_interpreter
from tests.fakes.clock import run_virtually
from tests.fakes.environment import Talker
from tests.fakes.house import open_house


def settings() -> tuple[float, tuple[int, ...], int]:
    return round(sys.getswitchinterval(), 6), gc.get_threshold(), gc.get_freeze_count()


def test_the_settings_apply_inside_and_are_taken_back():
    before = settings()
    with quiet_interpreter():
        interval, thresholds, frozen = settings()
        assert (interval, thresholds) == (0.001, COLLECT_EVERY)
        assert frozen > before[2]
    assert settings() == before


def test_rollouts_leave_nothing_that_only_a_full_collection_would_find():
    config = Config(
        run=RunConfig(dir="runs/fake", steps=8),
        model=ModelConfig(path="models/none"),
        environment=EnvironmentConfig(name="talker"),
        rollout=RolloutConfig(groups_per_step=8, group_size=4, max_tokens=32),
    )

    async def unreachable() -> int:
        async with open_house(config, Talker(10_000), remember=False) as house, anyio.create_task_group() as tg:
            tg.start_soon(house.run.pump)
            await house.run.buffer.wait_until(lambda: house.run.state.step >= 7)
            gc.collect(1)
            found = gc.collect()
            tg.cancel_scope.cancel()
        return found

    with quiet_interpreter():
        assert run_virtually(unreachable) < 100
