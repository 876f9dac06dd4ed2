"""Generation workers that die, freeze or are lost for good, in whole runs through real processes."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import StartedRun, conserved, started

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ENVIRONMENT = '''
import anyio
from workers.environments.reverse_text import ReverseText

class Slow(ReverseText):
    """Long enough in each rollout for trouble to come in between."""
    async def rollout(self, ctx, prompt):
        await anyio.sleep(0.2)
        return await super().rollout(ctx, prompt)

class Finite(Slow):
    def prompts(self, seed):
        yield from (p for p, _ in zip(super().prompts(seed), range(24)))
'''


@pytest.fixture
def fleet_config(config: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "envs.py").write_text(ENVIRONMENT)
    return config | {
        "run": {"dir": "run", "steps": 12},
        "environment": {"name": "envs:Finite"},
        "rollout": config["rollout"] | {"max_tokens": 200},
        "fleet": {"probe_every_s": 0.5, "probe_timeout_s": 2.0},
    }


def generation_pids(run: StartedRun) -> list[int]:
    """The generation workers, oldest first."""
    return sorted(
        pid for pid in run.processes() if "workers.generation" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    )


async def test_a_killed_generation_worker_comes_back_with_current_weights(
    fleet_config: dict[str, Any], tmp_path: Path
) -> None:
    async with started(fleet_config, tmp_path) as run:
        await run.until(r"step 3/12")
        (victim,) = generation_pids(run)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        await run.until(r"generation-0 is quarantined: worker generation-0 died, signal SIGKILL")
        noticed = time.monotonic() - killed
        version = int((await run.until(r"generation-0 is serving: it acknowledged weight version ([1-9]\d*)"))[1])
        print(f"noticed after {noticed:.2f} s, serving again after {time.monotonic() - killed:.2f} s")
        assert await run.exit_code() == 0, run.output
        await run.gone()
    summary = run.summary()
    assert conserved(summary), summary
    assert noticed < 10
    assert 2 <= version <= 11
    assert (summary["steps"], summary["trained"], summary["dropped"], summary["evicted"]) == (12, 96, 0, 0)
    assert summary["drop_reasons"] == {}
    steps = run.metrics()
    assert steps[-1]["fleet"]["restarted"] == 1
    assert all(step["staleness_max"] <= 1 for step in steps)
    assert "swept" not in run.output


@pytest.mark.long
async def test_a_frozen_generation_worker_is_taken_out_and_comes_back_when_it_thaws(
    fleet_config: dict[str, Any], tmp_path: Path
) -> None:
    fleet_config["generation"] = {"workers": 2}
    async with started(fleet_config, tmp_path) as run:
        await run.until(r"step 2/12")
        victim = generation_pids(run)[0]
        os.kill(victim, signal.SIGSTOP)
        await run.until(r"generation-\d is quarantined: 2 probes in a row without an answer")
        await run.until(r"step 5/12")  # The other one plays on, and what the frozen one had is played there.
        os.kill(victim, signal.SIGCONT)
        await run.until(r"generation-\d is serving: it acknowledged weight version [1-9]")
        assert await run.exit_code() == 0, run.output
        await run.gone()
        assert victim not in run.processes()
    summary = run.summary()
    assert conserved(summary), summary
    assert (summary["steps"], summary["trained"], summary["dropped"]) == (12, 96, 0)
    assert run.metrics()[-1]["fleet"]["restarted"] == 0


@pytest.mark.long
async def test_with_no_generation_worker_left_the_run_ends_and_says_why(
    fleet_config: dict[str, Any], tmp_path: Path
) -> None:
    fleet_config["fleet"]["max_restarts"] = 0
    async with started(fleet_config, tmp_path) as run:
        await run.until(r"step 1/12")
        os.kill(generation_pids(run)[0], signal.SIGKILL)
        assert await run.exit_code() == 1, run.output
        await run.gone()
    summary = run.summary()
    assert conserved(summary), summary
    assert summary["status"] == "failed"
    assert re.search(
        r"0 of 1 generation workers are left, fleet.min_serving is 1. Given up were generation-0: .*SIGKILL",
        summary["reason"],
    )
