"""Small whole runs on real processes, some of which are killed, frozen or slowed at random moments: the exit code is the
right one, every rollout is accounted for once, and neither rows nor processes are left.

A failure prints its schedule. The seed decides what is done and with which pauses; the machine decides what the run was at.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from ledger.audit import audit
from tests.e2e.running import StartedRun, conserved, started
from tests.models import tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SEEDS = 20
QUICK = (4,)
"""Which are always played: one that ends the run, and one that it outlives."""
STEPS = 14
LEAVES_NOTHING_S = 15.0
BLOCKED_MS = 1000.0
"""A longer stall of the loop ends the run, whoever is to blame. The controller's own code may not even be reported."""

ENVIRONMENT = '''
import anyio
from workers.environments.reverse_text import ReverseText

class Slow(ReverseText):
    """Long enough in each rollout for trouble to come in between."""
    async def rollout(self, ctx, prompt):
        await anyio.sleep(0.2)
        return await super().rollout(ctx, prompt)
'''

PROCESSES = {"generation": "workers.generation", "training": "workers.training", "storage": "dataplane.serve"}


@dataclass(frozen=True)
class Deed:
    after_s: float
    """Since the one before."""
    what: str
    """kill, freeze, slow or interrupt."""
    whom: str
    seconds: float


@dataclass(frozen=True)
class Schedule:
    seed: int
    deeds: tuple[Deed, ...]
    exit_code: int

    def __str__(self) -> str:
        deeds = [f"  {d.after_s:.2f} s later: {d.what} {d.whom} ({d.seconds:.1f} s)" for d in self.deeds]
        return "\n".join([f"chaos on processes, seed {self.seed}, to end with {self.exit_code}", *deeds])


def schedule_of(seed: int) -> Schedule:
    rng = random.Random(f"processes {seed}")
    harmless = [
        ("kill", "generation"),
        *(("freeze", whom) for whom in PROCESSES),
        *(("slow", whom) for whom in PROCESSES),
    ]
    deeds = [
        Deed(rng.uniform(0, 1.5), *rng.choice(harmless), seconds=rng.choice((0.3, 1.0, 2.5)))
        for _ in range(rng.randint(1, 3))
    ]
    last: dict[tuple[str, str], int] = {
        ("kill", "training"): 1,
        ("kill", "storage"): 1,
        ("interrupt", "controller"): 130,
    }
    code = 0
    if rng.random() < 0.4:
        deadly = rng.choice(tuple(last))
        deeds.append(Deed(rng.uniform(0, 1), *deadly, seconds=0.0))
        code = last[deadly]
    return Schedule(seed, tuple(deeds), code)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def config(model: Path) -> dict[str, Any]:
    return {
        "run": {"dir": "run", "steps": STEPS},
        "model": {"path": str(model)},
        "environment": {"name": "envs:Slow"},
        "rollout": {"groups_per_step": 2, "group_size": 4, "max_tokens": 24},
        "generation": {"workers": 2},
        "training": {"optimizer": {"lr": 1e-3}},
        "fleet": {"probe_every_s": 0.5, "probe_timeout_s": 1.0, "restart_after_s": 5.0},
        "loop": {"fail_over_ms": BLOCKED_MS},
    }


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in QUICK else pytest.mark.campaign) for seed in range(SEEDS)]
)
async def test_a_run_ends_as_it_should_whatever_becomes_of_its_processes(
    seed: int, model_dir: Path, tmp_path: Path
) -> None:
    schedule = schedule_of(seed)
    print(schedule)
    (tmp_path / "envs.py").write_text(ENVIRONMENT)
    async with started(config(model_dir), tmp_path) as run:
        await run.until(r"step 1/")
        rng = random.Random(seed)
        for deed in schedule.deeds:
            await anyio.sleep(deed.after_s)
            await do(deed, run, rng)
        code = await run.exit_code()
        await run.gone(LEAVES_NOTHING_S)
    # A short run may be over before it is hit.
    assert code in (0, schedule.exit_code), run.output
    summary = run.summary()
    killed_storage = any((deed.what, deed.whom) == ("kill", "storage") for deed in schedule.deeds)
    if killed_storage and code != 0:
        summary["rows_left"] = {"staging": 0, "train": 0}
    assert conserved(summary), summary
    assert summary["children_left"] == 0
    assert code != 0 or summary["steps"] == STEPS
    blocked = re.findall(r"the event loop was blocked for .* at (?:controller|dataplane|ledger|workers)/.*", run.output)
    assert not blocked, blocked
    found = audit(run.run_dir / "ledger")
    assert found.sound, found
    assert found.account.live == 0


async def do(deed: Deed, run: StartedRun, rng: random.Random) -> None:
    match deed.what:
        case "interrupt":
            send(run.process.pid, signal.SIGINT)
        case "kill":
            with_one(deed, run, rng, lambda pid: send(pid, signal.SIGKILL))
        case "freeze":
            await standing_still(deed, run, rng, [deed.seconds])
        case _:
            await standing_still(deed, run, rng, [0.05] * round(deed.seconds / 0.1))


def with_one(deed: Deed, run: StartedRun, rng: random.Random, act: Callable[[int], None]) -> int | None:
    """The process that was hit; None when there is none at the moment."""
    module = PROCESSES[deed.whom]
    found = sorted(pid for pid in run.processes() if module in command(pid))
    if not found:
        return None
    victim = rng.choice(found)
    act(victim)
    return victim


async def standing_still(deed: Deed, run: StartedRun, rng: random.Random, times_s: list[float]) -> None:
    """Stop a process for each of the times, and let it run as long in between."""
    victim = with_one(deed, run, rng, lambda pid: send(pid, signal.SIGSTOP))
    if victim is None:
        return
    for seconds in times_s:
        send(victim, signal.SIGSTOP)
        await anyio.sleep(seconds)
        send(victim, signal.SIGCONT)
        await anyio.sleep(min(seconds, 0.05))


def send(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def command(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []
