"""Groups that fail or grow too old, in whole runs on fakes: each ends once, for a reason, and the steps go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from controller.config.schema import (
    Config,
    EnvironmentConfig,
    FailuresConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
)
from ledger.events import GroupAborted, GroupDropped, MemoryLog, RolloutAborted, RolloutFinalized
from ledger.reasons import Reason
from tests.chaos.checks import hold_at_the_end
from tests.fakes.clock import run_virtually
from tests.fakes.environment import Talker
from tests.fakes.house import FakeHouse, Speed, open_house
from workers.environments.base import Prompt, RolloutContext, RolloutResult

CONFIG = Config(
    run=RunConfig(dir="runs/failing", steps=4),
    model=ModelConfig(path="models/none"),
    environment=EnvironmentConfig(name="talker"),
    rollout=RolloutConfig(groups_per_step=2, group_size=2, max_staleness=1, max_tokens=48, timeout_s=60.0),
)


class Sometimes(Talker):
    """Before it plays it does something of a prompt's own."""

    def __init__(self, does: Callable[[RolloutContext, int], Any]) -> None:
        super().__init__(100, turns=1)
        self._does = does

    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        await self._does(ctx, prompt.data)
        return await super().rollout(ctx, prompt)


async def play(environment: Talker, rollout: dict[str, Any], failures: FailuresConfig) -> FakeHouse:
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, **rollout), failures=failures)
    async with open_house(config, environment, speed=Speed(token=0.05)) as house:
        with anyio.fail_after(3600):
            await house.play()
    hold_at_the_end(house)
    return house


def played(environment: Talker, failures: FailuresConfig | None = None, **rollout: Any) -> FakeHouse:
    return run_virtually(play, environment, rollout, failures or FailuresConfig())


def events(house: FakeHouse, kind: type) -> list[Any]:
    assert isinstance(house.log, MemoryLog)
    return [event for event in house.log.events if isinstance(event, kind)]


@pytest.mark.parametrize("sampler", [{"sampler": "ready_first"}, {"over_sampling": 1.5}])
def test_a_group_that_no_step_can_use_any_more_is_aborted_and_its_calls_with_it(sampler: dict[str, Any]) -> None:
    async def slow(ctx: RolloutContext, n: int) -> None:
        if n == 1:
            await ctx.chat([{"role": "user", "content": "wait"}])
            await anyio.sleep(50)

    house = played(Sometimes(slow), **sampler)
    assert house.error is None
    assert house.run.state.step == 4
    given_up = events(house, GroupAborted)
    assert "too_stale" in {event.reason for event in given_up}
    assert {e.rollout_id.partition(".")[0] for e in events(house, RolloutAborted)} >= {"g000001"}
    assert house.run.losses.report().reasons["aborted"] >= 2
    assert not any(house.swept.values())


def test_a_prompt_that_the_environment_cannot_cope_with_costs_its_group_and_not_the_run() -> None:
    async def raises(ctx: RolloutContext, n: int) -> None:
        await anyio.sleep(5 if n else 0)
        if n == 3:
            raise LookupError("no such file")

    house = played(Sometimes(raises))
    assert house.error is None
    assert house.run.state.step == 4
    assert [(e.group_id, e.reason) for e in events(house, GroupDropped)] == [("g000003", Reason.PROMPT_FAILED)]
    assert house.run.environment_failures.failed == 2


def test_one_failed_rollout_of_a_prompt_is_a_placeholder_of_its_group() -> None:
    async def raises(ctx: RolloutContext, n: int) -> None:
        await anyio.sleep(5 if n else 0)
        if n == 3 and ctx.rollout_id.endswith(".0"):
            raise LookupError("no such file")

    house = played(Sometimes(raises))
    assert house.error is None
    assert not events(house, GroupDropped)
    reasons = {e.rollout_id: e.reason for e in events(house, RolloutFinalized) if e.reason}
    assert reasons == {"g000003.0": Reason.ENVIRONMENT_FAILED}


def test_a_rollout_whose_reward_is_no_number_is_a_placeholder_too() -> None:
    class Divides(Sometimes):
        async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
            result = await super().rollout(ctx, prompt)
            return replace(result, reward=float("nan")) if ctx.rollout_id == "g000003.0" else result

    async def nothing(ctx: RolloutContext, n: int) -> None:
        await anyio.sleep(5 if n else 0)

    house = played(Divides(nothing))
    assert house.error is None
    (rejected,) = [e for e in events(house, RolloutFinalized) if e.reason]
    assert (rejected.rollout_id, rejected.reason) == ("g000003.0", Reason.ENVIRONMENT_FAILED)
    assert rejected.detail.startswith("reward is nan; it must be a finite number")


def test_more_failures_than_the_budget_end_the_run() -> None:
    async def raises(ctx: RolloutContext, n: int) -> None:
        await anyio.sleep(1)
        if n > 3:
            raise LookupError("no such file")

    house = played(Sometimes(raises), FailuresConfig(max_failed=3))
    assert "failures.max_failed 3 is used up" in str(house.error)


def test_a_turn_that_takes_too_long_is_cut_off_and_a_long_call_is_not_one() -> None:
    async def thinks(ctx: RolloutContext, n: int) -> None:
        if n == 2:
            await anyio.sleep(40)

    house = played(Sometimes(thinks), turn_timeout_s=1.5)
    assert house.error is None
    reasons = {e.rollout_id: e.reason for e in events(house, RolloutFinalized) if e.reason}
    assert {r for r, why in reasons.items() if why is Reason.TURN_TIMEOUT} == {"g000002.0", "g000002.1"}
    stood = {e.detail for e in events(house, RolloutFinalized) if e.reason}
    assert stood == {f"it stood at {__file__}:{thinks.__code__.co_firstlineno + 2} in {thinks.__qualname__}"}


def test_a_step_shrinks_to_its_floor_instead_of_waiting_for_another_group() -> None:
    async def raises(ctx: RolloutContext, n: int) -> None:
        await anyio.sleep(0.5 if n else 0)
        if n in (3, 5):
            raise LookupError("no such file")

    for sampler in ("windowed", "in_order"):
        house = played(Sometimes(raises), sampler=sampler, min_step_batch_fraction=0.5)
        assert house.error is None
        sizes = [report.groups for report in house.observer.reports]
        assert len(sizes) == 4
        assert set(sizes) == {1, 2}
