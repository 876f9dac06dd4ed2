"""Whole runs that are interrupted at a random moment of their life, start and end included: the exit code says so, and what
is left behind is whole, accounted for, and can be continued. A second signal ends the process at once, whatever it is at.

The seed decides after which line, and how long after it, a signal comes; the machine decides what the run was at.
"""

from __future__ import annotations

import random
import re
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from controller.checkpoint import latest, read_state
from ledger.audit import audit
from tests.e2e.running import StartedRun, conserved, finished, started
from tests.models import tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.campaign]

SEEDS = 50
SECOND_SEEDS = 25
STEPS = 10
CONTINUED = 5
"""One in so many is continued to its end."""
AT_ONCE_S = 15.0
"""A guard: it is far below what any orderly way out may take, and far above what a busy machine makes of `at once`."""

ENVIRONMENT = '''
import anyio
from workers.environments.reverse_text import ReverseText

class Slow(ReverseText):
    """Long enough in each rollout for a signal to come in between."""
    async def rollout(self, ctx, prompt):
        await anyio.sleep(0.1)
        return await super().rollout(ctx, prompt)
'''

LINES = {
    r"^.* run run: ": 1.0,
    r"starting the data plane": 4.0,
    r"starting workers": 8.0,
    r"step 1/": 2.0,
    r"step 4/": 2.0,
    r"step 9/": 1.0,
    r"writing the last checkpoint": 0.3,
    r"stopping the workers": 2.0,
}
"""Lines that a run prints, and for how many seconds after each there is something to interrupt."""


@dataclass(frozen=True)
class Moment:
    line: str
    after_s: float

    @classmethod
    def of(cls, rng: random.Random) -> Moment:
        line = rng.choice(tuple(LINES))
        return cls(line, rng.uniform(0, LINES[line]))

    async def come(self, run: StartedRun) -> None:
        await run.until(self.line)
        await anyio.sleep(self.after_s)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def config(model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "envs.py").write_text(ENVIRONMENT)
    weights = tmp_path / "weights"
    weights.mkdir()
    return {
        "run": {"dir": "run", "steps": STEPS},
        "model": {"path": str(model_dir)},
        "environment": {"name": "envs:Slow"},
        "rollout": {"groups_per_step": 2, "group_size": 4, "max_tokens": 24},
        "training": {"optimizer": {"lr": 1e-3}},
        "weight_sync": {"dir": str(weights)},
        "checkpoint": {"every_steps": 1},
    }


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_a_run_that_is_interrupted_leaves_what_the_next_one_continues(
    seed: int, config: dict[str, Any], tmp_path: Path
) -> None:
    moment = Moment.of(random.Random(f"interrupt {seed}"))
    async with started(config, tmp_path) as run:
        await moment.come(run)
        code = await _interrupted(run)
        print(f"{moment}: exit code {code}, while {_at(run)}")
        await run.gone()
    # What was interrupted at its very end is finished all the same.
    assert code == 130 or (code == 0 and run.summary()["status"] == "finished"), run.output
    assert "Traceback" not in run.output
    _left_nothing(run, tmp_path)
    trained = (run.run_dir / "summary.json").exists()
    if trained:
        summary = run.summary()
        assert conserved(summary), summary
        assert summary["children_left"] == 0
        _whole(run.run_dir, summary["steps"])
    if code == 130 and seed % CONTINUED == 0:
        await _continued(config, tmp_path)


@pytest.mark.parametrize("seed", range(SECOND_SEEDS))
async def test_a_second_signal_ends_it_at_once_and_the_next_run_continues(
    seed: int, config: dict[str, Any], tmp_path: Path
) -> None:
    rng = random.Random(f"second {seed}")
    moment, pause_s = Moment.of(rng), rng.choice((0.0, rng.uniform(0, 0.1), rng.uniform(0, 1.5)))
    async with started(config, tmp_path) as run:
        await moment.come(run)
        run.interrupt()
        await anyio.sleep(pause_s)
        with anyio.fail_after(AT_ONCE_S):
            code = await _interrupted(run)
        print(f"{moment}, {pause_s:.2f} s: exit code {code}, while {_at(run)}")
        await run.gone()
    assert code == 130 or (code == 0 and run.summary()["status"] == "finished"), run.output
    assert "Traceback" not in run.output
    _left_nothing(run, tmp_path, weights=False)
    if code == 130 and seed % CONTINUED == 0:
        await _continued(config, tmp_path)


async def _interrupted(run: StartedRun) -> int:
    """Its exit code. Prints how long it took to end."""
    began = time.monotonic()
    if run.process.returncode is None:
        run.interrupt(signal.SIGINT)
    code = await run.exit_code()
    print(f"ended {time.monotonic() - began:.2f} s after the signal")
    return code


def _at(run: StartedRun) -> str:
    """The last thing that it said it was at before it heard the signal."""
    before = re.split(r"^.*SIGINT: ", run.output, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    return before[-1][:60] if before else "it began"


def _left_nothing(run: StartedRun, folder: Path, *, weights: bool = True) -> None:
    sockets = list(Path(tempfile.gettempdir()).glob(f"monoloop-{run.process.pid}-*"))
    assert not sockets
    if weights:
        assert not list((folder / "weights").iterdir())


def _whole(run_dir: Path, steps: int) -> None:
    """Every file in a run's folder is complete, and they agree on how far the run came."""
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    unfinished = [path for path in run_dir.rglob("*") if path.name.startswith(".") and path.name != ".lock"]
    assert not unfinished
    assert not (run_dir / "status.json").exists()
    for path in files:
        if path.suffix == ".json":
            msgspec.json.decode(path.read_bytes())
    reports = [msgspec.json.decode(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)]
    assert [report["step"] for report in reports] == list(range(1, steps + 1))
    found = audit(run_dir / "ledger")
    assert found.sound, found
    assert found.torn is None
    assert found.account.live == 0
    if steps:
        newest = latest(run_dir / "checkpoints")
        assert newest is not None
        assert read_state(newest).step == steps


async def _continued(config: dict[str, Any], folder: Path) -> None:
    newest = latest(folder / "run" / "checkpoints")
    if newest is not None and read_state(newest).step == STEPS:
        return  # there is nothing left to do
    run = await finished(config, folder)
    summary = run.summary()
    assert conserved(summary), summary
    _whole(run.run_dir, STEPS)
    _left_nothing(run, folder)
