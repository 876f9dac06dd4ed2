"""The ledger of a run, read back as its user does: after its end, after a crash and a resume, after a full disk."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.running import conserved, finished, started

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ENVIRONMENTS = '''
import resource
from pathlib import Path

import anyio
from workers.environments.reverse_text import ReverseText

class Slow(ReverseText):
    """Long enough in each rollout for a kill to come in between."""
    async def rollout(self, ctx, prompt):
        await anyio.sleep(0.3)
        return await super().rollout(ctx, prompt)

class FillsTheDisk(ReverseText):
    """After some rollouts no file of the controller grows beyond the size that the ledger has, its largest."""
    played = 0
    async def rollout(self, ctx, prompt):
        self.played += 1
        if self.played == 60:
            size = Path("run/ledger/segment-000001.log").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return await super().rollout(ctx, prompt)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    return tmp_path


def ledger(command: str, run_dir: Path, *arguments: str, code: int = 0) -> str:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "ledger", command, str(run_dir), *arguments],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def stories(run_dir: Path) -> list[Any]:
    return [msgspec.json.decode(line) for line in ledger("show", run_dir, "--json").splitlines()]


async def test_every_rollout_of_a_run_can_be_read_back(config: dict[str, Any], folder: Path) -> None:
    run = await finished(config, folder)
    verdict = ledger("verify", run.run_dir)
    assert "dispatched 24 = trained 24 + evicted 0 + dropped 0 + aborted 0 + live 0; lost=0 duplicated=0" in verdict
    assert verdict.endswith("sound\n")
    told = stories(run.run_dir)
    assert Counter(s["fate"]["step"] for s in told) == {1: 8, 2: 8, 3: 8}
    assert all(s["state"] == "verified" and s["selection"] == "unique_leaf" for s in told)
    tokens = sum(call["generated_tokens"] for s in told for call in s["calls"])
    assert tokens == sum(step["completion_tokens"] for step in run.metrics())
    block = ledger("show", run.run_dir, "--rollout", told[0]["rollout_id"])
    assert "verdict     verified: every token is proven" in block
    assert "became      trained in step 1" in block


@pytest.mark.long
async def test_after_a_kill_the_ledger_goes_on_and_every_account_is_right(config: dict[str, Any], folder: Path) -> None:
    config |= {
        "run": {"dir": "run", "steps": 6},
        "environment": {"name": "envs:Slow"},
        "checkpoint": {"every_steps": 1},
    }
    async with started(config, folder) as run:
        await run.until(r"step 3/6")
        os.kill(run.process.pid, signal.SIGKILL)
        await run.gone()
    assert "live 0" not in ledger("verify", run.run_dir)
    run = await finished(config, folder)
    summary = run.summary()
    assert conserved(summary)
    assert (summary["steps"], summary["trained"], summary["dispatched"]) == (6, 48, 48)
    verdict = ledger("verify", run.run_dir)
    assert "live 0; lost=0 duplicated=0" in verdict
    assert verdict.endswith("sound\n")
    told = stories(run.run_dir)
    assert len({s["rollout_id"] for s in told}) == len(told), "no id is given out twice"
    lasting = [s for s in told if s["fate"]["end"] == "trained" and s["fate"]["undone_by_resume"] is None]
    assert Counter(s["fate"]["step"] for s in lasting) == dict.fromkeys(range(1, 7), 8)
    others = [s for s in told if s not in lasting]
    assert others
    assert all(
        s["fate"]["undone_by_resume"] is not None or "the run was resumed from step" in s["fate"]["detail"]
        for s in others
    )


@pytest.mark.long
async def test_a_full_disk_ends_the_run_with_one_clear_message(config: dict[str, Any], folder: Path) -> None:
    config |= {"environment": {"name": "envs:FillsTheDisk"}, "run": {"dir": "run", "steps": 50}}
    run = await finished(config, folder, code=1)
    failed = re.findall(r"^(.*)JournalFailed: ledger run/ledger/segment-000001.log: (.*)$", run.output, re.MULTILINE)
    why = "cannot be written: File too large; what was acknowledged is kept"
    assert failed == [("  reason    ", why), ("", why)], "in the summary, and as the error: " + run.output
    assert "Traceback" not in run.output
    summary = run.summary()
    assert summary["status"] == "failed"
    assert conserved(summary)
    assert ledger("verify", run.run_dir).endswith("sound\n")
