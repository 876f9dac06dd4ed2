"""A whole run on vLLM: it trains, syncs weights in flight, and goes on when the engine's core is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import StartedRun, conserved, started
from tests.models import tiny_model
from tests.needs import needs_vllm

pytestmark = [pytest.mark.anyio, pytest.mark.slow, needs_vllm]


async def test_a_run_outlives_two_deaths_of_its_engine_core(config: dict[str, Any], tmp_path: Path) -> None:
    config["model"]["path"] = str(tiny_model(tmp_path / "model", head_dim=32))
    config["run"]["steps"] = 6
    config["generation"] = {"engine": "vllm", "max_batch": 16}
    config["rollout"]["max_tokens"] = 100
    cores: list[int] = []
    async with started(config, tmp_path) as run:
        for step in (1, 3):
            await run.until(rf"step +{step}/6")
            cores.append(core_of(run))
            os.kill(cores[-1], signal.SIGKILL)
        await run.until(r"step +5/6")
        cores.append(core_of(run))
        assert await run.exit_code() == 0, run.output
        await run.gone()
    assert len({*cores}) == 3
    assert not any(Path(f"/proc/{core}").exists() for core in cores)
    summary = run.summary()
    assert (summary["status"], summary["steps"]) == ("finished", 6)
    assert conserved(summary), summary


def core_of(run: StartedRun) -> int:
    """The child of the generation worker. It has a title in place of its command line and environment."""
    workers = [pid for pid in run.processes() if b"workers.generation" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    (core,) = {
        int(child)
        for worker in workers
        for thread in Path(f"/proc/{worker}/task").iterdir()
        for child in (thread / "children").read_text().split()
    } - {*workers}
    return core
