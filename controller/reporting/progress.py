"""The display of a running controller: live on a terminal, plain lines elsewhere.

All drawing is done in a thread, so that a terminal that has been stopped or scrolled back holds up nothing; when it has
gone altogether, the run goes on without a display.
"""

from __future__ import annotations

import io
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, redirect_stdout
from typing import Literal

from anyio import CancelScope, Event, current_time, move_on_after

from controller.reporting.background import background
from controller.reporting.daemon import DaemonThread
from controller.reporting.evaluation_report import EvaluationReport
from controller.reporting.frame import Frame, Line, ProgressSnapshot, View
from controller.reporting.plain_view import PlainView, evaluation_line
from controller.reporting.step_report import StepReport
from controller.reporting.terminal import Terminal
from controller.reporting.text import clean_line

logger = logging.getLogger(__name__)

FRAME_S = 0.25
MAX_LINES = 2000
"""Lines that may wait for a slow terminal; more are counted, not shown. They are in the log."""


class Progress:
    """`snapshot` returns None while the run starts up. `first_step` and `evaluations`: steps finished, and evaluations made,
    before this process took up the run.

    `phase`, `step`, `evaluation`, `note`, `warning` and `worker_line` never wait; the last three may come from any thread.
    """

    def __init__(
        self,
        *,
        name: str,
        steps: int,
        snapshot: Callable[[], ProgressSnapshot | None],
        first_step: int = 0,
        evaluations: Sequence[EvaluationReport] = (),
        terminal: Terminal | None = None,
        close_timeout_s: float = 2.0,
    ) -> None:
        self.name = name
        self._steps = steps
        self._first_step = first_step
        self._snapshot = snapshot
        self._terminal = terminal or Terminal()
        self._close_timeout_s = close_timeout_s
        self._began = self._phase_since = self._step_ended = time.monotonic()
        self._phase: str | None = None
        self._latest: StepReport | None = None
        self._rewards: deque[float] = deque(maxlen=64)
        self._evaluations = list(evaluations)
        self._step_seconds: deque[float] = deque(maxlen=8)
        self._warnings: deque[Line] = deque(maxlen=3)
        self._lines: deque[Line | StepReport] = deque()
        self._skipped = 0
        self._farewell = ""
        self._closing = Event()
        self._scope = CancelScope()
        self._thread = DaemonThread("display")

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Progress]:
        """Shows the run while the body lasts, its cancellation included. On leaving, the last state stays on the screen.
        On a live display, what the body prints to `sys.stdout` appears above it."""
        resumed = f", resumed after step {self._first_step}" if self._first_step else ""
        self.note(f"run {self.name}: {self._steps} steps{resumed}")
        async with background(self._run, self._stop):
            if self._terminal.live:
                with _Lines(self.note) as lines, redirect_stdout(lines):
                    yield self
            else:
                yield self

    def phase(self, text: str | None) -> None:
        """What the controller as a whole is at, e.g. `starting data plane`; None hands over to the snapshot's activity."""
        self._phase = text
        self._phase_since = time.monotonic()
        if text is not None and not self._terminal.live:
            self.note(text)

    def step(self, report: StepReport) -> None:
        self._latest = report
        self._step_ended = time.monotonic()
        self._step_seconds.append(report.seconds)
        if report.reward_mean is not None:
            self._rewards.append(report.reward_mean)
        self._lines.append(report)
        if report.not_finite:
            self.warning(f"step {report.step}: not finite: {', '.join(report.not_finite)}")

    def evaluation(self, report: EvaluationReport) -> None:
        self._evaluations.append(report)
        self.note(evaluation_line(report))

    def note(self, text: str) -> None:
        self._add("note", "", text)

    def warning(self, text: str) -> None:
        self._add("warning", "", text)

    def worker_line(self, worker: str, text: str) -> None:
        """What a worker process wrote."""
        self._add("worker", worker, text)

    def farewell(self, text: str) -> None:
        """Text, such as the run's summary, that stands as it is below all else when the display has been closed."""
        self._farewell = text.rstrip("\n") + "\n"

    def _add(self, kind: Literal["note", "warning", "worker"], source: str, text: str) -> None:
        for line in text.splitlines():
            if len(self._lines) < MAX_LINES:
                self._lines.append(Line(time=time.time(), kind=kind, source=clean_line(source), text=clean_line(line)))
            else:
                self._skipped += 1

    def _take_lines(self) -> list[Line | StepReport]:
        if self._skipped:
            skipped, self._skipped = self._skipped, 0
            text = f"{skipped} lines not shown: the display does not keep up"
            self._lines.append(Line(time=time.time(), kind="warning", source="", text=text))
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        self._warnings.extend(line for line in lines if isinstance(line, Line) and line.kind == "warning")
        return lines

    def _frame(self) -> Frame:
        now = time.monotonic()
        snapshot = self._snapshot()
        step = max(snapshot.step if snapshot else self._first_step, self._latest.step if self._latest else 0)
        if self._phase is not None or snapshot is None:
            activity, since = self._phase or "starting", self._phase_since
        else:
            activity, since = snapshot.activity, snapshot.activity_since
        return Frame(
            name=self.name,
            steps=self._steps,
            step=step,
            elapsed_s=now - self._began,
            activity=activity,
            activity_s=now - since,
            snapshot=snapshot,
            latest=self._latest,
            rewards=tuple(self._rewards),
            evaluations=tuple(self._evaluations[:1] + self._evaluations[1:][-1:]),
            eta_s=self._eta(step, now),
            warnings=tuple(self._warnings),
        )

    def _eta(self, step: int, now: float) -> float | None:
        """Steps left at the mean pace of the last ones, less what the current one has already taken."""
        if not self._step_seconds or step >= self._steps:
            return None
        pace = sum(self._step_seconds) / len(self._step_seconds)
        return (self._steps - step) * pace - min(now - self._step_ended, pace)

    def _stop(self) -> None:
        self._scope.deadline = current_time() + self._close_timeout_s
        self._closing.set()

    async def _run(self) -> None:
        """Draws until closed, then the last frame. Once the screen has gone it only waits."""
        try:
            with self._scope:
                await self._draw_frames()
            if self._scope.cancelled_caught:
                logger.warning("the terminal did not take the last lines within %g s", self._close_timeout_s)
        except OSError as error:
            logger.warning("the display has gone, the run goes on without it: %s", error)
            await self._closing.wait()
        finally:
            self._thread.close()

    async def _draw_frames(self) -> None:
        view = await self._thread.call(lambda: _make_view(self._terminal))
        drawn = time.monotonic()
        last = False
        while not last:
            with move_on_after(FRAME_S):
                await self._closing.wait()
            last = self._closing.is_set()
            lines = self._take_lines()
            if lines or view.due(time.monotonic() - drawn):
                await self._draw(view, lines)
                drawn = time.monotonic()
        frame = self._frame()
        await self._thread.call(lambda: view.close(frame, self._farewell))

    async def _draw(self, view: View, lines: Sequence[Line | StepReport]) -> None:
        frame = self._frame()
        await self._thread.call(lambda: view.draw(frame, lines))


class _Lines(io.TextIOBase):
    """What is printed to it goes, line by line, to `emit`."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._partial = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._emit(line)
        return len(text)

    def close(self) -> None:
        if self._partial:
            self.write("\n")
        super().close()


def _make_view(terminal: Terminal) -> View:
    sys.stdout.flush()
    if not terminal.live:
        return PlainView(terminal)
    from controller.reporting.live_view import LiveView

    return LiveView(terminal)
