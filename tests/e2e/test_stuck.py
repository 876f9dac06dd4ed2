"""A run that stands still says why, in a terminal, and can be ended: whatever its environment does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from controller.waits.graph import WaitGraph
from tests.e2e.running import HANG_GUARD_S, conserved, finished, started

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

ENVIRONMENTS = '''
import time
from workers.environments.reverse_text import ReverseText

class Stubborn(ReverseText):
    """Asks for ever, and catches whatever comes of it."""
    async def rollout(self, ctx, prompt):
        while True:
            try:
                await ctx.chat([{"role": "user", "content": "again"}])
            except:
                pass

class Sleeps(ReverseText):
    """Blocks the loop, for SECONDS in each rollout."""
    async def rollout(self, ctx, prompt):
        time.sleep(SECONDS)
        return await super().rollout(ctx, prompt)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stuck.py").write_text(ENVIRONMENTS)
    return tmp_path


def using(config: dict[str, Any], environment: str, **sections: Any) -> dict[str, Any]:
    return config | {"environment": {"name": f"stuck:{environment}"}} | sections


async def status(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [sys.executable, "-m", "controller", "status", *arguments],
            capture_output=True,
            text=True,
            timeout=HANG_GUARD_S,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    )


async def test_a_stubborn_environment_is_shown_by_the_status_and_does_not_withstand_ctrl_c(
    config: dict[str, Any], folder: Path
) -> None:
    run_dir = folder / "run"
    async with started(using(config, "Stubborn"), folder) as run:
        url = (await run.until(r"status: (http://127\.0\.0\.1:\d+)")).group(1)
        early = await status(str(run_dir))
        assert early.stdout.startswith("run run, process "), early.stderr
        with anyio.fail_after(HANG_GUARD_S):
            while True:
                told = await status(url)
                if "the slowest:" in told.stdout:
                    break
                await anyio.sleep(0.2)
        assert "step 0 of 3, 0 groups committed" in told.stdout
        assert "train pump: waiting for a step's groups" in told.stdout
        assert "4 of 4 slots taken: 4 generating" in told.stdout
        assert "step 0 takes 2 groups: 2 generating; 0 missing" in told.stdout
        assert "generation-0: serving" in told.stdout
        graph = msgspec.json.decode((await status(url, "--json")).stdout, type=WaitGraph)
        assert graph.rollouts == 16
        assert graph.culprit is not None
        assert graph.culprit.part in ("environment", "generation workers")
        assert "thread MainThread" in (await status(str(run_dir), "--stacks")).stdout
        health = await anyio.to_thread.run_sync(lambda: urllib.request.urlopen(f"{url}/health").read())
        assert msgspec.json.decode(health)["status"] == "ok"
        run.interrupt(signal.SIGINT)
        assert await run.exit_code() == 130, run.output
        await run.gone()
    assert "was left behind" in (run_dir / "controller.log").read_text()
    assert "Traceback" not in run.output
    assert conserved(run.summary())
    ended = await status(str(run_dir))
    assert ended.returncode == 1
    assert "no run is active" in ended.stderr


@pytest.mark.campaign
async def test_a_stubborn_environment_does_not_withstand_its_rollouts_deadline(
    config: dict[str, Any], folder: Path
) -> None:
    short = config["rollout"] | {"timeout_s": 2, "call_timeout_s": 2}
    stubborn = using(config, "Stubborn", rollout=short, finalizer={"max_dropped_in_a_row": 4})
    run = await finished(stubborn, folder, code=1)
    assert "4 groups in a row were dropped" in run.output
    assert run.summary()["drop_reasons"]["rollout_timeout"] >= 16
    assert conserved(run.summary())


@pytest.mark.long
async def test_a_loop_that_stays_blocked_ends_the_run_and_says_where(config: dict[str, Any], folder: Path) -> None:
    (folder / "stuck.py").write_text(ENVIRONMENTS.replace("SECONDS", "1000"))
    run = await finished(using(config, "Sleeps", loop={"exit_after_s": 2}), folder, code=4)
    assert "stuck.py:17 in Sleeps.rollout; it was given up" in run.output
    stacks = (run.run_dir / "stacks.txt").read_text()
    assert "event loop: blocked for" in stacks
    assert "stuck.py:17 in Sleeps.rollout" in stacks


@pytest.mark.long
async def test_fail_over_ends_the_run_with_the_name_of_what_blocked_it(config: dict[str, Any], folder: Path) -> None:
    (folder / "stuck.py").write_text(ENVIRONMENTS.replace("SECONDS", "3"))
    run = await finished(using(config, "Sleeps", loop={"fail_over_ms": 1500}), folder, code=4)
    assert "stuck.py:17 in Sleeps.rollout" in run.output
    assert "the limit is 1500 ms" in run.output
    assert conserved(run.summary())
