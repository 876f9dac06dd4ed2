"""What a person sees of a run, in one place: display, log, metrics, trace. Nothing here waits for a disk or a terminal."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread

from controller.reporting.evaluation_report import EvaluationReport
from controller.reporting.frame import ProgressSnapshot
from controller.reporting.log import logging_to
from controller.reporting.metrics_log import MetricsLog, read_evaluations
from controller.reporting.plain_view import evaluation_line
from controller.reporting.progress import Progress
from controller.reporting.step_report import StepReport
from controller.reporting.trace import TraceLog
from controller.reporting.writer import ReportWriter

logger = logging.getLogger(__name__)


class Observer:
    """Use `open_observer`."""

    def __init__(
        self,
        writer: ReportWriter,
        progress: Progress,
        metrics: MetricsLog,
        trace: TraceLog,
        evaluations: Sequence[EvaluationReport],
    ) -> None:
        self.writer = writer
        self.progress = progress
        self.name = progress.name
        self.activity: str | None = "starting"
        """What was given to `doing` last."""
        self.evaluations = list(evaluations)
        """All of the run so far."""
        self._metrics = metrics
        self._trace = trace

    def step(self, report: StepReport) -> None:
        self._metrics.write(report)
        self.progress.step(report)
        logger.info("step %d done in %.2f s, reward %s", report.step, report.seconds, report.reward_mean)

    def evaluation(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)
        self._metrics.write_evaluation(report)
        self.progress.evaluation(report)
        logger.info("%s", evaluation_line(report))

    def doing(self, what: str | None) -> None:
        """What the controller as a whole does: starting up, winding down; None while it trains."""
        self.activity = what
        self.progress.phase(what)
        logger.info("%s", what or "training")

    def worker_line(self, worker: str, line: str) -> None:
        """What a worker process printed."""
        self.progress.worker_line(worker, line)
        logger.info("[%s] %s", worker, line)

    def call(self, rollout_id: str, start_s: float, end_s: float) -> None:
        """A model call, on `time.monotonic()`'s clock."""
        self._trace.complete(rollout_id, "generate", start_s, end_s, "rollouts")

    def worker_state(self, worker: str, state: str, start_s: float, end_s: float) -> None:
        """A generation worker was in another state than serving."""
        self._trace.complete(worker, state, start_s, end_s, worker)

    def phase(self, name: str, step: int, start_s: float, end_s: float) -> None:
        """A phase of an optimizer step."""
        track = "weight_sync" if name == "weight_sync" else "train"
        self._trace.complete(name, name, start_s, end_s, track, {"step": step})


@asynccontextmanager
async def open_observer(
    run_dir: Path, *, steps: int, first_step: int, snapshot: Callable[[], ProgressSnapshot | None]
) -> AsyncGenerator[Observer]:
    """Display and files of a run in `run_dir`; `first_step` steps were done before. Raises WriteFailed, OSError."""
    async with ReportWriter().running() as writer:
        metrics = await MetricsLog.open(writer, run_dir, resume_at=first_step)
        trace = await TraceLog.open(writer, run_dir, resume=first_step > 0)
        evaluations = await anyio.to_thread.run_sync(read_evaluations, run_dir)
        progress = Progress(
            name=run_dir.name, steps=steps, snapshot=snapshot, first_step=first_step, evaluations=evaluations
        )
        async with logging_to(run_dir, progress.warning), progress.running():
            yield Observer(writer, progress, metrics, trace, evaluations)
