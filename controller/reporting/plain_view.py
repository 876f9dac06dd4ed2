"""Progress as plain lines, for a log file, a pipe or CI: one per step, and one when nothing happens for long."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from controller.reporting.evaluation_report import EvaluationReport
from controller.reporting.frame import Frame, Line
from controller.reporting.step_report import StepReport
from controller.reporting.terminal import Terminal
from controller.reporting.text import duration, number, percent

QUIET_S = 10.0
"""After this long without a line, one says what is being waited for."""
_TRAINER_LABELS = {"loss": "loss", "grad_norm": "grad", "entropy": "entropy"}
_SHORT_PHASES = {"wait_rollouts": "wait", "weight_sync": "sync"}


class PlainView:
    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def due(self, quiet_s: float) -> bool:
        return quiet_s >= QUIET_S

    def draw(self, frame: Frame, lines: Sequence[Line | StepReport]) -> None:
        for line in lines:
            if isinstance(line, StepReport):
                self._print(line.time, step_line(line, frame))
            else:
                self._print(line.time, log_line(line))
        if not lines:
            self._print(time.time(), quiet_line(frame))
        self._terminal.flush()

    def close(self, frame: Frame, farewell: str) -> None:
        self._terminal.write(farewell)
        self._terminal.flush()

    def _print(self, unix_s: float, text: str) -> None:
        self._terminal.write(f"{clock(unix_s)} {text}\n")


def clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def log_line(line: Line) -> str:
    if line.kind == "worker":
        return f"[{line.source}] {line.text}"
    return f"WARNING {line.text}" if line.kind == "warning" else line.text


def step_line(report: StepReport, frame: Frame) -> str:
    """One step in about 150 ASCII characters."""
    parts = [
        f"step {report.step}/{frame.steps}",
        f"reward {number(report.reward_mean)} (std {number(report.reward_std)})",
        f"{number(report.tokens_per_s)} tok/s",
        f"stale {number(report.staleness_mean, 2)} (max {number(report.staleness_max, 1)})",
        f"length {number(report.completion_length_mean)}",
    ]
    parts += [f"{label} {value}" for label, value in trainer_values(report).items()]
    if report.truncated_fraction:
        parts.append(f"truncated {percent(report.truncated_fraction)}")
    if report.placeholders:
        parts.append(f"placeholders {report.placeholders}")
    parts.append(f"{duration(report.seconds)} ({phase_times(report.phases)})")
    if frame.eta_s is not None and report is frame.latest:
        parts.append(f"eta {duration(frame.eta_s)}")
    return "  ".join(parts)


def evaluation_line(report: EvaluationReport) -> str:
    parts = [f"evaluation after step {report.step}: reward {with_error(report)}"]
    if report.samples > 1:
        parts.append(f"best of {report.samples} {number(report.reward_best)}")
    parts += [f"{name} {number(value)}" for name, value in report.environment.items() if value is not None]
    if report.completion_length_mean is not None:
        parts.append(f"length {number(report.completion_length_mean)}")
    if report.truncated_fraction:
        parts.append(f"truncated {percent(report.truncated_fraction)}")
    if report.rejected:
        parts.append(f"unproven {report.rejected}")
    parts.append(f"{report.questions} held-out questions x {report.samples} in {duration(report.seconds)}")
    return "  ".join(parts)


def with_error(report: EvaluationReport, plus_minus: str = "+-") -> str:
    """An evaluation's mean reward and its standard error."""
    error = "" if report.reward_error is None else f" {plus_minus}{number(report.reward_error, 2)}"
    return number(report.reward_mean) + error


def trainer_values(report: StepReport) -> dict[str, str]:
    """The trainer's most telling numbers, by short label."""
    trainer, agreement = report.trainer, report.agreement
    values = {
        f"trainer/{name}": (label, trainer.get(name)) for name, label in _TRAINER_LABELS.items() if name in trainer
    }
    if "kl" in agreement:
        values["agreement/kl"] = ("kl", agreement["kl"])
    return {label: "nan" if tag in report.not_finite else number(value) for tag, (label, value) in values.items()}


def phase_times(phases: Mapping[str, float | None]) -> str:
    """The phases that took at least 0.05 s."""
    shown = [(name, seconds) for name, seconds in phases.items() if seconds is not None and seconds >= 0.05]
    return " ".join(f"{_SHORT_PHASES.get(name, name)} {seconds:.1f}" for name, seconds in shown) or "-"


def quiet_line(frame: Frame) -> str:
    parts = [f"{frame.activity} for {duration(frame.activity_s)}"]
    if frame.snapshot is not None:
        parts.append(f"step {frame.step}/{frame.steps}")
        parts.append("rollouts: " + counts(frame.snapshot.rollouts))
        parts.append("groups: " + counts(frame.snapshot.buffer))
        if frame.snapshot.held_up_by:
            parts.append(f"held up by the {frame.snapshot.held_up_by}")
    return "  ".join(parts)


def counts(by_name: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in by_name.items() if count) or "none"
