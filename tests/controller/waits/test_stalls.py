"""Each way to stand still is noticed, and blamed on what is at fault."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from controller.first_error import first_error
from controller.watchdog import RunStalled
from tests.controller.waits.small_run import Plays, small_run
from tests.fakes.house import FakeHouse
from workers.environments.base import Prompt, RolloutContext, RolloutResult

pytestmark = pytest.mark.anyio

HANG_GUARD_S = 60


class Hangs(Plays):
    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        await anyio.sleep_forever()
        raise AssertionError


class Asks(Plays):
    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        await ctx.chat([{"role": "user", "content": "a"}])
        raise AssertionError


class NoPrompts(Plays):
    """Its data set does not answer."""

    def __init__(self) -> None:
        self.answer = threading.Event()

    def prompts(self, seed: int) -> Iterator[Prompt]:
        self.answer.wait(HANG_GUARD_S)
        yield Prompt(id="late")


class Unwell(Plays):
    """Plays on, and says that it is not well."""

    async def health(self) -> None:
        raise ConnectionError("the sandbox is gone")


async def _never() -> None:
    await anyio.sleep_forever()


def dead_rollout_pump(s: FakeHouse) -> None:
    s.run._rollouts.run = _never  # type: ignore[method-assign]


def dead_finalizer(s: FakeHouse) -> None:
    s.run.finalizers.run = _never  # type: ignore[method-assign]


def frozen_data_plane(s: FakeHouse) -> None:
    s.store.freeze()


def wedged_engine(s: FakeHouse) -> None:
    (engine,) = s.engines.values()
    engine.wedged = True
    engine.set_pace()


def stopped_engine(s: FakeHouse) -> None:
    s.workers[0].freeze()


def full_buffer(s: FakeHouse) -> None:
    s.run._training._sampler.select = lambda view: None  # type: ignore[method-assign]


def silent_trainer(s: FakeHouse) -> None:
    s.trainer.silent.add("train_microbatch")


def silent_weight_sync(s: FakeHouse) -> None:
    s.workers[0].silent.add("load_weights")


def nothing(s: FakeHouse) -> None: ...


STALLS: dict[str, tuple[Callable[[], Any], Callable[[FakeHouse], None], str]] = {
    "a rollout pump that died": (Plays, dead_rollout_pump, "rollout pump: a group may be dispatched, and it does not"),
    "finalizers that died": (Plays, dead_finalizer, "finalizer: 4 groups wait to be finalized, and no finalizer works"),
    "a data plane that froze": (Plays, frozen_data_plane, "data plane: "),
    "an engine that answers probes and generates nothing": (Asks, wedged_engine, "generation-0: answers, with 8 calls"),
    "an engine that was stopped": (Asks, stopped_engine, "generation workers: none serves (generation-0 "),
    "an environment that never returns": (Hangs, nothing, "environment: rollout g00000"),
    "a buffer full of what no step takes": (Plays, full_buffer, "replay buffer: full (4 ready)"),
    "a trainer that never answers": (Plays, silent_trainer, "training worker: train pump has been training step 0"),
    "a weight sync that is never acknowledged": (
        Plays,
        silent_weight_sync,
        "weight sync: generation-0 has not acknowledged: loading version 1",
    ),
    "prompts that do not come": (NoPrompts, nothing, "prompts: rollout pump has been drawing a prompt"),
}


@asynccontextmanager
async def _planted(folder: Path, environment: Any, plant: Callable[[FakeHouse], None]) -> AsyncGenerator[FakeHouse]:
    captured = isinstance(environment, Asks)
    async with small_run(folder, environment, token_capture={"enabled": captured}) as s:
        plant(s)
        yield s


async def _until_stalled(pump: Callable[[], Awaitable[None]]) -> str:
    try:
        with anyio.fail_after(HANG_GUARD_S):
            await pump()
    except Exception as error:
        stall = first_error(error)
        assert isinstance(stall, RunStalled), stall
        return str(stall)
    raise AssertionError("it did not stall")


async def test_each_stall_is_blamed_on_its_cause(tmp_path: Path) -> None:
    reports: dict[str, str] = {}

    async def stall(name: str) -> None:
        make, plant, _ = STALLS[name]
        environment = make()
        async with _planted(tmp_path / name.replace(" ", "-"), environment, plant) as s:
            reports[name] = await _until_stalled(s.run.pump)
        if isinstance(environment, NoPrompts):
            environment.answer.set()

    async with anyio.create_task_group() as tg:
        for name in STALLS:
            tg.start_soon(stall, name)
    blamed = {name: report.split("\n", 1)[0] for name, report in reports.items()}
    wrong = {
        name: blamed[name]
        for name, (_, _, culprit) in STALLS.items()
        if f"because of the {culprit}" not in blamed[name]
    }
    assert not wrong
    for report in reports.values():
        assert report.startswith("no progress for ")
        assert "who waits" in report or "replay buffer" in report
        assert "event loop: lag p99" in report


async def test_an_environment_that_is_not_well_ends_the_run_although_it_plays(tmp_path: Path) -> None:
    async with _planted(tmp_path / "run", Unwell(), nothing) as s:
        report = await _until_stalled(s.run.pump)
    assert report.startswith("not healthy for ")
    assert "environment: ConnectionError: the sandbox is gone" in report.split("\n", 1)[0]
    assert s.run.state.step > 0, "it made progress all the time"
