"""The Controller inside a program of one's own: every way to leave it ends in order, on any asyncio runner."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from controller import Config, Controller, Prompt, RolloutContext, RolloutResult
from tests.e2e.running import conserved
from workers.environments.offload import offload

pytestmark = pytest.mark.slow

HANG_GUARD_S = 150


class Echo:
    """An environment object of the program's own."""

    def prompts(self, seed: int) -> Iterator[Prompt]:
        raise AssertionError("the program brings its own prompts")

    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        answer = await ctx.chat([{"role": "user", "content": prompt.data}])
        return RolloutResult(reward=float(await offload(len, answer.text, timeout_s=60)))


def own_prompts() -> Iterator[Prompt]:
    return (Prompt(id=f"n{i}", data=f"number {i}") for i in range(10_000))


def make(config: dict[str, Any], folder: Path, *, steps: int = 3) -> Config:
    return msgspec.convert(config | {"run": {"dir": str(folder / "run"), "steps": steps}}, Config)


def summary_of(folder: Path) -> Any:
    return json.loads((folder / "run" / "summary.json").read_text())


def test_steps_come_one_by_one_under_plain_asyncio(config: dict[str, Any], tmp_path: Path) -> None:
    called: list[int] = []

    async def on_step(report: Any) -> None:
        called.append(report.step)

    async def program() -> None:
        controller = Controller(make(config, tmp_path), environment=Echo(), prompts=own_prompts(), on_step=on_step)
        with pytest.raises(RuntimeError, match="inside `async with"):
            await controller.run()
        async with controller as c:
            seen = [step.step async for step in c.steps()]
            assert seen == called == [1, 2, 3]
            with pytest.raises(RuntimeError, match="once"):
                await c.run()
        assert c.summary is not None
        assert c.summary.status == "finished"

        assert multiprocessing.active_children() == [], "scoring processes are kept no longer than the run"

    asyncio.run(asyncio.wait_for(program(), HANG_GUARD_S))
    assert conserved(summary_of(tmp_path))


def test_leaving_the_loop_early_ends_the_run_in_order(config: dict[str, Any], tmp_path: Path) -> None:
    async def program() -> None:
        with anyio.fail_after(HANG_GUARD_S):
            async with Controller(make(config, tmp_path, steps=500)) as c:
                async for step in c.steps():
                    if step.step == 2:
                        break

    anyio.run(program)
    summary = summary_of(tmp_path)
    assert conserved(summary)
    assert (summary["status"], summary["reason"]) == ("interrupted", "the caller left")


@pytest.mark.campaign
def test_an_error_in_the_loop_body_is_raised_at_a_checkpoint(config: dict[str, Any], tmp_path: Path) -> None:
    async def program() -> None:
        with anyio.fail_after(HANG_GUARD_S):
            async with Controller(make(config, tmp_path, steps=500)) as c:
                async for _ in c.steps():
                    raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        anyio.run(program)
    summary = summary_of(tmp_path)
    assert conserved(summary)
    assert (summary["status"], summary["reason"]) == ("interrupted", "the caller's code raised LookupError: mine")
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.long
def test_a_timeout_from_outside_ends_the_run_in_order(config: dict[str, Any], tmp_path: Path) -> None:
    async def program() -> None:
        with anyio.fail_after(HANG_GUARD_S):
            async with Controller(make(config, tmp_path, steps=500)) as c:
                with anyio.move_on_after(3) as scope:
                    await c.run()
                assert scope.cancelled_caught

    anyio.run(program)
    assert conserved(summary_of(tmp_path))


@pytest.mark.campaign
def test_two_runs_after_one_another_in_a_thread(config: dict[str, Any], tmp_path: Path) -> None:
    ended: list[str] = []

    async def program() -> None:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            async with Controller(make(config, tmp_path / name, steps=1)) as c:
                ended.append((await c.run()).status)

    thread = threading.Thread(target=anyio.run, args=(program,))
    thread.start()
    thread.join(2 * HANG_GUARD_S)
    assert not thread.is_alive()
    assert ended == ["finished", "finished"]


def test_an_environment_that_is_none_is_named_before_anything_starts(config: dict[str, Any], tmp_path: Path) -> None:
    async def program() -> None:
        async with Controller(make(config, tmp_path), environment=object()):  # type: ignore[arg-type]
            pass

    with pytest.raises(TypeError, match=r"has no method prompts\(\)"):
        anyio.run(program)
    assert not (tmp_path / "run").exists()
