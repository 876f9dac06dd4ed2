"""`python -m controller`, from start to every kind of end, through all real parts."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from controller.reporting.trace import overlap
from tests.e2e.running import conserved, finished, started

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def LONG(*values: object) -> Any:  # noqa: N802  # reads as what it is in a table
    return pytest.param(*values, marks=pytest.mark.long)


def CAMPAIGN(*values: object) -> Any:  # noqa: N802
    return pytest.param(*values, marks=pytest.mark.campaign)


ENVIRONMENTS = '''
import math, time
import anyio
from controller import Prompt, RolloutResult
from workers.environments.reverse_text import ReverseText

class Slow(ReverseText):
    """Long enough in each rollout for a signal to come in between."""
    async def rollout(self, ctx, prompt):
        await anyio.sleep(0.3)
        return await super().rollout(ctx, prompt)

class Raises(ReverseText):
    async def rollout(self, ctx, prompt):
        raise KeyError("answer")

class NaN(ReverseText):
    async def rollout(self, ctx, prompt):
        return RolloutResult(reward=math.nan)

class Wordy(ReverseText):
    async def rollout(self, ctx, prompt):
        await ctx.chat([{"role": "user", "content": "x" * 5000}])

class Finite(ReverseText):
    def prompts(self, seed):
        yield from (p for p, _ in zip(super().prompts(seed), range(5)))

class NoPrompts(ReverseText):
    def prompts(self, seed):
        yield {"question": "none"}

class Hangs(ReverseText):
    """Some rollouts of each group never come back; the others are trained."""
    async def rollout(self, ctx, prompt):
        if ctx.rollout_id.endswith(".1"):
            await anyio.sleep(3600)
        return await super().rollout(ctx, prompt)

class SwallowsFailures(ReverseText):
    """Catches the failure of a call that is too long, and scores what it has."""
    async def rollout(self, ctx, prompt):
        try:
            await ctx.chat([{"role": "user", "content": "x" * 5000}])
        except Exception:
            return RolloutResult(reward=0.5)

class TwoTurns(ReverseText):
    """A second turn that continues the first one's exact tokens."""
    async def rollout(self, ctx, prompt):
        ask = [{"role": "user", "content": "Reverse: " + str(prompt.data)[:20]}]
        first = await ctx.chat(ask)
        second = await ctx.chat([*ask, first.message, {"role": "user", "content": "again"}])
        return RolloutResult(reward=float(len(second.text) % 3), metrics={"turns": 2.0})
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    return tmp_path


def using(config: dict[str, Any], environment: str, **rollout: Any) -> dict[str, Any]:
    return config | {"environment": {"name": f"envs:{environment}"}, "rollout": config["rollout"] | rollout}


async def test_a_run_accounts_for_every_rollout_and_leaves_nothing(config: dict[str, Any], folder: Path) -> None:
    run = await finished(config, folder)
    summary = run.summary()
    assert conserved(summary)
    assert (summary["status"], summary["steps"], summary["trained"], summary["dispatched"]) == ("finished", 3, 24, 24)
    assert "dispatched 24 = trained 24 + evicted 0 + dropped 0 + aborted 0" in run.output
    steps = run.metrics()
    assert [s["step"] for s in steps] == [1, 2, 3]
    assert all(s["tokens_per_s"] > 0 for s in steps)
    assert steps[0]["agreement"]["difference_max"] < 1e-4
    assert "swept" not in run.output
    for name in ("trace.json", "report.png", "config.json", "controller.log"):
        assert (run.run_dir / name).stat().st_size > 0, name
    assert list((run.run_dir / "tensorboard").iterdir())
    assert (run.run_dir / "checkpoints" / "step-000003" / "trainer").is_dir()
    # The generation of step 2's groups goes on while step 1 trains.
    assert overlap(run.run_dir / "trace.json", "generate", "train") > 0


async def test_on_policy_nothing_is_generated_while_training(config: dict[str, Any], folder: Path) -> None:
    run = await finished(using(config, "Slow", max_staleness=0), folder)
    assert overlap(run.run_dir / "trace.json", "generate", "train") == 0
    assert {s["staleness_max"] for s in run.metrics()} == {0.0}
    assert conserved(run.summary())


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), CAMPAIGN(signal.SIGTERM, 143)])
async def test_a_signal_stops_at_a_checkpoint_that_the_next_run_continues(
    config: dict[str, Any], folder: Path, signum: signal.Signals, code: int
) -> None:
    config = using(config, "Slow", sampler="in_order") | {"run": {"dir": "run", "steps": 6}}
    async with started(config, folder) as run:
        await run.until(r"step 2/6")
        run.interrupt(signum)
        assert await run.exit_code() == code, run.output
        await run.gone()
    stopped = run.summary()
    assert conserved(stopped)
    assert (stopped["status"], stopped["reason"]) == ("interrupted", signum.name)
    assert stopped["aborted"] > 0
    run = await finished(config, folder)
    summary = run.summary()
    assert conserved(summary)
    assert summary["steps"] == 6
    assert [s["step"] for s in run.metrics()] == [1, 2, 3, 4, 5, 6]
    assert summary["trained"] == 6 * 8


async def test_a_signal_during_start_up_ends_it_cleanly(config: dict[str, Any], folder: Path) -> None:
    async with started(config, folder) as run:
        await run.until(r"starting workers")
        run.interrupt()
        assert await run.exit_code() == 130, run.output
        await run.gone()
    assert "Traceback" not in run.output


@pytest.mark.long
async def test_a_second_signal_ends_it_at_once(config: dict[str, Any], folder: Path) -> None:
    config = using(config, "Slow") | {"run": {"dir": "run", "steps": 50}}
    async with started(config, folder) as run:
        await run.until(r"step 1/50")
        run.interrupt()
        run.interrupt()
        assert await run.exit_code() == 130
        await run.gone()


@pytest.mark.long
async def test_a_killed_controller_takes_everything_with_it(config: dict[str, Any], folder: Path) -> None:
    weights = folder / "weights"
    weights.mkdir()
    config = using(config, "Slow") | {"weight_sync": {"dir": str(weights)}}
    async with started(config, folder) as run:
        await run.until(r"step 1/3")
        os.kill(run.process.pid, signal.SIGKILL)
        await run.gone()
    assert list(weights.iterdir())
    run = await finished(config, folder)
    assert conserved(run.summary())
    assert not list(weights.iterdir())
    assert (folder / "run.1").is_dir(), "the killed run's folder is kept aside"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("Raises", r"environment Raises, prompt '.*', rollout g00000\d\.\d: rollout\(\) raised KeyError: 'answer'"),
        CAMPAIGN(
            "NaN", r"environment NaN, prompt '.*', rollout g00000\d\.\d: reward is nan; it must be a finite number"
        ),
        CAMPAIGN("Wordy", r"environment Wordy, .*prompt_too_long: .*5\d\d\d.*512"),
        CAMPAIGN(
            "NoPrompts",
            r"prompt number 1 is \{'question': 'none'\} of type dict; an environment's prompts\(\) must yield",
        ),
    ],
)
async def test_a_broken_environment_ends_the_run_with_one_clear_message(
    config: dict[str, Any], folder: Path, environment: str, message: str
) -> None:
    run = await finished(using(config, environment), folder, code=1)
    assert re.search(message, run.output), run.output
    assert "Traceback" not in run.output
    assert conserved(run.summary())
    assert run.summary()["status"] == "failed"


async def test_a_worker_that_dies_at_start_is_named(config: dict[str, Any], folder: Path, model_dir: Path) -> None:
    broken = folder / "broken"
    broken.mkdir()
    for file in model_dir.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    run = await finished(config | {"model": {"path": str(broken)}}, folder, code=2)
    assert "model.safetensors" in run.output
    header = broken / "config.json"
    weights.write_bytes((model_dir / "model.safetensors").read_bytes())
    header.write_text(header.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    run = await finished(config | {"model": {"path": str(broken)}}, folder, code=1)
    assert "did not start" in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize("victim", ["training", LONG("storage")])
async def test_a_process_that_is_killed_ends_the_run_by_name(config: dict[str, Any], folder: Path, victim: str) -> None:
    config = using(config, "Slow") | {"run": {"dir": "run", "steps": 100}}
    async with started(config, folder) as run:
        await run.until(r"step 1/100")
        pid = next(p for p in run.processes() if _is(p, victim))
        os.kill(pid, signal.SIGKILL)
        assert await run.exit_code() == 1, run.output
        await run.gone()
    assert f"{victim}" in run.output.split("step 1/100")[1]
    assert "SIGKILL" in run.output or "signal 9" in run.output
    assert run.summary()["status"] == "failed"


def _is(pid: int, victim: str) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    wanted = {"training": "workers.training", "storage": "dataplane.serve"}[victim]
    return wanted in command and (victim != "storage" or "storage" in command)


@pytest.mark.campaign
async def test_finite_prompts_end_the_run_when_they_are_used_up(config: dict[str, Any], folder: Path) -> None:
    run = await finished(using(config, "Finite") | {"run": {"dir": "run", "steps": 100}}, folder)
    assert run.summary()["trained"] == 20
    assert [s["groups"] for s in run.metrics()] == [2, 2, 1]


@pytest.mark.campaign
async def test_rollouts_past_their_deadline_become_placeholders(config: dict[str, Any], folder: Path) -> None:
    run = await finished(using(config, "Hangs", timeout_s=3, call_timeout_s=3), folder)
    summary = run.summary()
    assert conserved(summary)
    assert summary["drop_reasons"] == {"rollout_timeout": 6}
    assert (summary["trained"], summary["dropped"]) == (18, 6)
    assert {s["placeholders"] for s in run.metrics()} == {2}


@pytest.mark.long
async def test_a_step_whose_groups_all_fail_is_a_stall_not_a_hang(config: dict[str, Any], folder: Path) -> None:
    config = using(config, "SwallowsFailures", call_timeout_s=2) | {
        "watchdog": {"stall_after_s": 4},
        "finalizer": {"max_dropped_in_a_row": 1_000_000},
    }
    run = await finished(config, folder, code=3)
    assert conserved(run.summary())
    assert run.summary()["status"] == "stalled"
    assert "no progress for" in run.output
    assert "call_failed" in str(run.summary()["drop_reasons"])


async def test_a_second_turn_continues_the_exact_tokens(config: dict[str, Any], folder: Path) -> None:
    run = await finished(using(config, "TwoTurns"), folder)
    assert conserved(run.summary())
    assert run.summary()["drop_reasons"] == {}
    assert all(s["environment"] == {"turns": 2.0} for s in run.metrics())
    assert run.metrics()[0]["agreement"]["difference_max"] < 1e-4
