"""The ledger of a run, read back as its user does: after its end, after a crash and a resume, after a full disk."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from tests.e2e.running import conserved, finished, started

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ENVIRONMENTS = '''
import subprocess
from pathlib import Path

import anyio
from controller import RolloutResult
from workers.environments.reverse_text import ReverseText

class Slow(ReverseText):
    """Long enough in each rollout for a kill to come in between."""
    async def rollout(self, ctx, prompt):
        await anyio.sleep(0.3)
        return await super().rollout(ctx, prompt)

class OnASmallDisk(ReverseText):
    """Has the ledger on a disk of 48 KiB, and notes what became of each call."""
    def prompts(self, seed):
        # The first one is drawn when the ledger has its folder, and nothing in it.
        if not Path("mounted").exists():
            Path("mounted").touch()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", "run/ledger"], check=True)
        yield from super().prompts(seed)

    async def rollout(self, ctx, prompt):
        note("asked", ctx.rollout_id)
        try:
            answer = await ctx.chat([{"role": "user", "content": "hi"}])
        except BaseException as error:
            note("errors", type(error).__name__)
            raise
        note("answered", answer.call_id)
        return RolloutResult(reward=len(answer.text) / 10)

def note(file, line):
    with Path(file).open("a") as lines:
        print(line, file=lines)
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


@pytest.fixture
def mountable(folder: Path) -> Iterator[None]:
    """Skips where no disk can be mounted; unmounts the ledger's."""
    trial = folder / "trial"
    trial.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(trial)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    subprocess.run(["umount", str(trial)], check=True)
    yield
    if os.path.ismount(folder / "run" / "ledger"):
        subprocess.run(["umount", "--lazy", str(folder / "run" / "ledger")], check=True)


@pytest.mark.long
@pytest.mark.usefixtures("mountable")
async def test_a_full_disk_ends_the_run_with_one_clear_message_and_with_space_it_goes_on(
    config: dict[str, Any], folder: Path
) -> None:
    config |= {"environment": {"name": "envs:OnASmallDisk"}, "checkpoint": {"every_steps": 1}}
    run = await finished(config, folder, "--set", "run.steps=100", code=1)
    told = r"^(?:\d\d:\d\d:\d\d )?(.*)JournalFailed: ledger run/ledger/segment-000001.log: (.*)$"
    failed = re.findall(told, run.output, re.MULTILINE)
    why = "cannot be written: No space left on device; what was acknowledged is kept"
    places = ["WARNING the run ends: failed, ", "  reason    ", ""]
    assert failed == [(place, why) for place in places], "at once, in the summary, and as the error: " + run.output
    assert "Traceback" not in run.output
    summary = run.summary()
    assert summary["status"] == "failed"
    assert conserved(summary)
    assert_kept(run.run_dir, folder)
    asked, answered, errors = ((folder / name).read_text().split() for name in ("asked", "answered", "errors"))
    assert len(asked) == len(answered) + len(errors), "nobody waits for ever"
    assert set(errors) <= {"JournalFailed", "CancelledError"}

    await anyio.run_process(["mount", "-o", "remount,size=16m", str(run.run_dir / "ledger")])
    steps = summary["steps"] + 2
    run = await finished(config, folder, "--set", f"run.steps={steps}")
    assert "resumed after step" in run.output
    summary = run.summary()
    assert conserved(summary)
    assert (summary["status"], summary["steps"]) == ("finished", steps)
    assert_kept(run.run_dir, folder)
    assert "live 0; lost=0 duplicated=0" in ledger("verify", run.run_dir)


def assert_kept(run_dir: Path, folder: Path) -> None:
    """The record is sound, and has every call that an agent got an answer to."""
    assert ledger("verify", run_dir).endswith("sound\n")
    committed = {c["call_id"] for s in stories(run_dir) for c in s["calls"] if c["state"] == "committed"}
    answered = (folder / "answered").read_text().split()
    assert answered
    assert committed.issuperset(answered)
