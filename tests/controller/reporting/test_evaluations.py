"""An evaluation is reported wherever a step is: its file, TensorBoard, display, picture and summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from controller.reporting.evaluation_report import EvaluationReport
from controller.reporting.metrics_log import MetricsLog, read_evaluations
from controller.reporting.plain_view import evaluation_line
from controller.reporting.summary import format_summary
from controller.reporting.writer import ReportWriter
from tests.controller.reporting.reports import snapshot, step_report
from tests.controller.reporting.screens import terminal
from tests.controller.reporting.test_metrics_log import scalars
from tests.controller.reporting.test_progress import ESCAPES, make_progress
from tests.controller.reporting.test_report import drawn_texts, write_metrics
from tests.controller.reporting.test_summary import summary

pytestmark = pytest.mark.anyio


def evaluation(step: int, mean: float, **changes: Any) -> EvaluationReport:
    fields: dict[str, Any] = {
        "step": step,
        "time": 1.79e9 + step,
        "seconds": 4.2,
        "questions": 48,
        "samples": 4,
        "reward_mean": mean,
        "reward_error": 0.0311,
        "reward_best": 0.5,
        "environment": {"exact": mean},
        "completion_length_mean": 22.5,
        "truncated_fraction": 0.4,
        "oldest_version": step,
    }
    return EvaluationReport(**fields | changes)


async def log(run_dir: Path, resume_at: int, *reports: EvaluationReport) -> None:
    async with ReportWriter().running() as writer:
        metrics = await MetricsLog.open(writer, run_dir, resume_at=resume_at)
        for report in reports:
            metrics.write_evaluation(report)


async def test_a_resume_keeps_what_its_checkpoint_has_and_a_new_run_nothing(tmp_path: Path):
    first, second, third = (evaluation(step, 0.1) for step in (0, 4, 8))
    await log(tmp_path, 0, first, second, third)
    assert read_evaluations(tmp_path) == [first, second, third]
    await log(tmp_path, 4)
    assert read_evaluations(tmp_path) == [first, second]
    await log(tmp_path, 0)
    assert read_evaluations(tmp_path) == []


async def test_tensorboard_has_its_numbers(tmp_path: Path):
    await log(tmp_path, 0, evaluation(0, 0.125), evaluation(4, 0.75))
    assert scalars(tmp_path, "evaluation/reward_mean") == [(0, 0.125), (4, 0.75)]
    assert scalars(tmp_path, "evaluation/exact") == [(0, 0.125), (4, 0.75)]


def test_a_line_tells_it_with_what_went_wrong_in_it():
    assert evaluation_line(evaluation(4, 0.25)) == (
        "evaluation after step 4: reward 0.250 +-0.031  best of 4 0.500  exact 0.250  length 22.5  truncated 40%"
        "  48 held-out questions x 4 in 4.2s"
    )
    bare = evaluation(
        4,
        0.25,
        samples=1,
        reward_error=None,
        rejected=3,
        environment={},
        completion_length_mean=None,
        truncated_fraction=0,
    )
    assert evaluation_line(bare) == (
        "evaluation after step 4: reward 0.250  unproven 3  48 held-out questions x 1 in 4.2s"
    )


async def test_the_display_shows_the_first_and_the_latest():
    with terminal() as screen:
        earlier = [evaluation(0, 0.125), evaluation(4, 0.3)]
        async with make_progress(screen, snapshot=lambda: snapshot(8), evaluations=earlier).running() as shown:
            shown.evaluation(evaluation(8, 0.75))
            await anyio.sleep(0.6)
        output = ESCAPES.sub("", screen.read())
    assert "evaluation after step 8: reward 0.750" in output
    assert "0.125 ±0.031 → 0.750 ±0.031  after step 8" in output[output.rindex("╭") :]


async def test_the_picture_has_it_beside_the_rewards_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_metrics(tmp_path / "run", [step_report(step) for step in range(1, 9)])
    assert "held out" not in drawn_texts(monkeypatch, tmp_path / "run")
    await log(tmp_path / "run", 8, evaluation(0, 0.125), evaluation(8, 0.75))
    text = drawn_texts(monkeypatch, tmp_path / "run")
    assert "held out ± standard error" in text
    assert "Trainer vs. engine" in text
    assert "0 steps old" in text
    assert "1 step old" in text


def test_the_summary_compares_the_first_and_the_last():
    ends = summary(evaluation_first=evaluation(0, 0.125), evaluation_last=evaluation(24, 0.75))
    line = "  held out  0.125 +-0.031 -> 0.750 +-0.031  (reward after steps 0 and 24, 48 questions x 4)"
    assert line in format_summary(ends, Path("run")).splitlines()
    once = format_summary(summary(evaluation_first=evaluation(0, 0.125)), Path("run"))
    assert "  held out  0.125 +-0.031  (reward after step 0, 48 questions x 4)" in once.splitlines()
    assert "held out" not in format_summary(summary(), Path("run"))
