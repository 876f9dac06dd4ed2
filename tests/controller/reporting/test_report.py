"""report.png is made from metrics.jsonl alone, for any run that has finished a step."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest
from anyio import CancelScope, fail_after

from controller.reporting import report as report_module
from controller.reporting.report import NoReport, main, make_report, write_report
from controller.reporting.step_report import StepReport
from tests.controller.reporting.reports import step_report

pytestmark = pytest.mark.anyio


def write_metrics(run_dir: Path, reports: list[StepReport]) -> None:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(reports))


def drawn_texts(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> str:
    """All text on the report."""
    from matplotlib.text import Text

    figures: list[object] = []
    draw = report_module._draw
    monkeypatch.setattr(report_module, "_draw", lambda *a: figures.append(draw(*a)) or figures[-1])
    write_report(run_dir)
    return "\n".join(text.get_text() for text in figures[0].findobj(Text))  # type: ignore[attr-defined]


def test_the_report_shows_each_curve_under_the_run_s_name(tmp_path, monkeypatch):
    write_metrics(tmp_path / "reverse-text", [step_report(step) for step in range(1, 31)])
    text = drawn_texts(monkeypatch, tmp_path / "reverse-text")
    png = (tmp_path / "reverse-text" / "report.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n")
    assert len(png) > 20_000
    assert "reverse-text: 30 steps, 3,840 rollouts trained" in text
    for title in ("Reward", "Staleness", "Step time", "tokens per second", "Completion length", "entropy", "Gradient"):
        assert title in text
    assert re.search(r"wait rollouts 50%", text)
    assert re.search(r"train 38%", text)
    assert "checkpoint" not in text
    assert "not finite" not in text


def test_the_report_marks_the_steps_in_which_a_generation_worker_was_taken_out(tmp_path, monkeypatch):
    counts = [0.0, 0.0, 1.0, 1.0, 3.0]
    marked = [step_report(i + 1, fleet={"quarantined": n}) for i, n in enumerate(counts)]
    write_metrics(tmp_path / "marked", marked)
    assert "a generation worker was taken out" in drawn_texts(monkeypatch, tmp_path / "marked")
    write_metrics(tmp_path / "calm", [step_report(step) for step in range(1, 6)])
    assert "was taken out" not in drawn_texts(monkeypatch, tmp_path / "calm")


def test_numbers_that_are_missing_or_not_finite_leave_gaps(tmp_path, monkeypatch):
    bare = step_report(2, trainer={}, phases={}, reward_mean=None, reward_std=None, tokens_per_s=None)
    diverged = step_report(3, trainer={"loss": float("nan"), "grad_norm": float("inf")})
    write_metrics(tmp_path, [step_report(1), bare, diverged])
    assert "not finite" in drawn_texts(monkeypatch, tmp_path)


@pytest.mark.parametrize("steps", [1, 500])
def test_short_and_long_runs_are_drawn(tmp_path, steps):
    write_metrics(tmp_path, [step_report(step) for step in range(1, steps + 1)])
    assert write_report(tmp_path).stat().st_size > 10_000


def test_a_run_in_which_nothing_was_measured_is_drawn(tmp_path):
    empty = dict.fromkeys(("reward_mean", "reward_std", "staleness_mean", "staleness_max", "tokens_per_s"))
    nothing = step_report(1, **empty, completion_length_mean=None, trainer={}, phases={}, seconds=0.0, counts={})
    write_metrics(tmp_path, [nothing])
    assert write_report(tmp_path).exists()


async def test_the_loop_has_it_drawn_by_a_process_of_its_own(tmp_path):
    write_metrics(tmp_path, [step_report(1), step_report(2)])
    assert await make_report(tmp_path) == tmp_path / "report.png"
    assert (tmp_path / "report.png").exists()


async def test_a_run_without_a_step_has_no_report(tmp_path):
    with pytest.raises(NoReport, match="holds no finished step"):
        await make_report(tmp_path)


async def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"{}\n")
    with pytest.raises(NoReport, match=r"metrics.jsonl, line 1: Object missing required field"):
        await make_report(tmp_path)


def report_processes() -> list[str]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [
        child for child in children if b"controller.reporting.report" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


async def test_a_cancelled_report_leaves_no_process(tmp_path):
    fifo = tmp_path / "metrics.jsonl"
    os.mkfifo(fifo)  # Reading it hangs, so the process does.
    with fail_after(60), CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(make_report, tmp_path)
            writer = await anyio.to_thread.run_sync(lambda: fifo.open("wb"))
            assert len(report_processes()) == 1
            scope.cancel()
    writer.close()
    assert scope.cancelled_caught
    assert report_processes() == []


async def test_a_report_that_takes_too_long_is_given_up(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(TimeoutError):
        await make_report(tmp_path, timeout_s=1.0)


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert main([]) == 2
    assert "usage: python -m controller.reporting.report RUN_DIR" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1
    assert "no report:" in capsys.readouterr().err
    write_metrics(tmp_path, [step_report(1)])
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.png")
    assert "matplotlib" in sys.modules
