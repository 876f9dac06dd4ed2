"""Progress as a live display on a terminal, drawn with rich, with log lines scrolling above it.

The terminal is never put into a state that would have to be restored (the cursor stays visible, no alternate screen, no
raw mode), so even a killed process leaves it usable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, cast

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from controller.reporting.frame import Frame, Line
from controller.reporting.plain_view import clock, phase_times, trainer_values, with_error
from controller.reporting.step_report import StepReport
from controller.reporting.terminal import Terminal
from controller.reporting.text import duration, number, percent, sparkline

_SPARKLINE_WIDTH = 32
_MAX_WIDTH = 110


class _Console(Console):
    def show_cursor(self, show: bool = True) -> bool:
        return False


class LiveView:
    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._unicode = terminal.unicode
        self._console = _Console(file=cast(IO[str], terminal), markup=False, highlight=False, emoji=False)
        self._live = Live(
            console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False, transient=False
        )
        self._live.start()

    def due(self, quiet_s: float) -> bool:
        return True

    def draw(self, frame: Frame, lines: Sequence[Line | StepReport]) -> None:
        above = [_log_text(line) for line in lines if isinstance(line, Line)]
        with self._console:  # One write for both.
            self._live.update(self.panel(frame), refresh=True)
            if above:
                self._console.print(Group(*above))

    def close(self, frame: Frame, farewell: str) -> None:
        self._live.update(self.panel(frame))
        self._live.stop()
        self._terminal.write(farewell)
        self._terminal.flush()

    def panel(self, frame: Frame) -> RenderableType:
        rows = Table.grid(padding=(0, 2), expand=True)
        rows.add_column(style="dim", no_wrap=True, width=10)
        rows.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._step_row(rows, frame)
        if frame.latest is not None:
            self._training_rows(rows, frame, frame.latest)
        if frame.evaluations:
            rows.add_row("held out", self._evaluations(frame))
        if frame.snapshot is not None:
            rows.add_row("rollouts", _counts(frame.snapshot.rollouts))
            rows.add_row("groups", _counts(frame.snapshot.buffer))
        rows.add_row("now", Text.assemble(frame.activity, ("  " + duration(frame.activity_s), "dim")))
        if frame.snapshot is not None and frame.snapshot.held_up_by:
            rows.add_row("held up by", frame.snapshot.held_up_by)
        for line in frame.warnings:
            rows.add_row(Text("warning", "yellow"), Text.assemble((clock(line.time) + "  ", "dim"), line.text))
        title = Text.assemble(("monoloop", "bold cyan"), "  ", (frame.name, "bold"))
        return Panel(
            rows,
            title=title,
            title_align="left",
            subtitle=Text(duration(frame.elapsed_s), "dim"),
            subtitle_align="right",
            box=box.ROUNDED if self._unicode else box.ASCII,
            border_style="bright_black",
            padding=(0, 1),
            width=min(self._console.width, _MAX_WIDTH),
        )

    def _step_row(self, rows: Table, frame: Frame) -> None:
        eta = f"eta {duration(frame.eta_s)}" if frame.eta_s is not None else ""
        line = Table.grid(padding=(0, 2))
        line.add_row(
            Text(f"{frame.step}/{frame.steps}", "bold"),
            ProgressBar(total=max(frame.steps, 1), completed=frame.step, width=_SPARKLINE_WIDTH),
            Text(percent(frame.step / max(frame.steps, 1))),
            Text(eta, "dim"),
        )
        rows.add_row("step", line)

    def _evaluations(self, frame: Frame) -> Text:
        """`0.11 ±0.03 → 0.74 ±0.06  after step 24`."""
        plus_minus, arrow = ("±", " → ") if self._unicode else ("+-", " -> ")
        text = Text()
        for report in frame.evaluations:
            text.append(arrow if text else "", "dim")
            text.append(with_error(report, plus_minus), "bold green")
        return text.append(f"  after step {frame.evaluations[-1].step}", "dim")

    def _training_rows(self, rows: Table, frame: Frame, report: StepReport) -> None:
        spark = sparkline(frame.rewards[-_SPARKLINE_WIDTH:], ascii_only=not self._unicode)
        plus_minus = "±" if self._unicode else "+-"
        rows.add_row(
            "reward",
            Text.assemble(
                (number(report.reward_mean), "bold green"),
                (f" {plus_minus}{number(report.reward_std)}  ", "dim"),
                (spark, "green"),
                (f"  last {len(frame.rewards)} steps" if len(frame.rewards) > 1 else "", "dim"),
            ),
        )
        rows.add_row(
            "tokens/s",
            _pairs(
                {
                    "": number(report.tokens_per_s),
                    "length": number(report.completion_length_mean),
                    "truncated": percent(report.truncated_fraction),
                    "staleness": f"{number(report.staleness_mean, 2)} (max {number(report.staleness_max, 1)})",
                }
            ),
        )
        rows.add_row("trainer", _pairs(trainer_values(report)))
        rows.add_row("step time", _pairs({"": duration(report.seconds), " ": phase_times(report.phases)}))


def _pairs(values: Mapping[str, str]) -> Text:
    """`value  label value  label value`, labels dim."""
    text = Text()
    for label, value in values.items():
        if text:
            text.append("   ")
        if label.strip():
            text.append(label + " ", "dim")
        text.append(value, "red" if value == "nan" else "")
    return text


def _counts(by_name: Mapping[str, int]) -> Text:
    text = Text()
    for name, count in by_name.items():
        text.append(f"{count:,}", "bold" if count else "dim")
        text.append(f" {name}   ", "dim")
    return text


def _log_text(line: Line) -> Text:
    head = (clock(line.time) + " ", "dim")
    if line.kind == "worker":
        return Text.assemble(head, (f"[{line.source}] ", "cyan"), line.text)
    return Text.assemble(head, (line.text, "yellow" if line.kind == "warning" else ""))
