"""metrics.jsonl, evaluations.jsonl and TensorBoard: one record per optimizer step or evaluation, also across a resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from controller.reporting.evaluation_report import EvaluationReport
from controller.reporting.files import AppendFile, replace_file
from controller.reporting.step_report import StepReport
from controller.reporting.tensorboard_log import Record, TensorBoardSink
from controller.reporting.writer import Channel, ReportWriter

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
TENSORBOARD_DIR = "tensorboard"


T = TypeVar("T")


class BadMetrics(ValueError):
    """A line of such a file is not what this program writes; the text names file, line and fault."""


class MetricsLog:
    """Make one with `MetricsLog.open`. It is closed with the writer."""

    def __init__(
        self, steps: Channel[StepReport], evaluations: Channel[EvaluationReport], board: Channel[Record]
    ) -> None:
        self._steps = steps
        self._evaluations = evaluations
        self._board = board

    @classmethod
    async def open(cls, writer: ReportWriter, run_dir: Path, *, resume_at: int = 0) -> MetricsLog:
        """`resume_at`: finished steps of the checkpoint that the run continues. Only lines of steps up to it are kept
        (0 keeps none), and TensorBoard is told to forget the later ones. Raises `WriteFailed`, `BadMetrics`."""
        steps = await writer.open(_JsonLines[StepReport](run_dir / METRICS_FILE, resume_at))
        # A run that begins anew has no evaluation either, not even of its step 0.
        evaluations = await writer.open(_JsonLines[EvaluationReport](run_dir / EVALUATIONS_FILE, resume_at or -1))
        board = await writer.open(TensorBoardSink(run_dir / TENSORBOARD_DIR, first_step=resume_at + 1))
        return cls(steps, evaluations, board)

    def write(self, report: StepReport) -> None:
        """Never waits. For durability before a checkpoint, `ReportWriter.flush`."""
        self._steps.put(report)
        self._board.put(report)

    def write_evaluation(self, report: EvaluationReport) -> None:
        """As `write`."""
        self._evaluations.put(report)
        self._board.put(report)


def read_reports(run_dir: Path) -> list[StepReport]:
    """The reports of metrics.jsonl, in order; none when there is no file. Blocks. Raises `BadMetrics`, `OSError`."""
    return _read(run_dir / METRICS_FILE, StepReport)


def read_evaluations(run_dir: Path) -> list[EvaluationReport]:
    """Those of evaluations.jsonl, likewise."""
    return _read(run_dir / EVALUATIONS_FILE, EvaluationReport)


def _read(path: Path, kind: type[T]) -> list[T]:
    decoder = msgspec.json.Decoder(kind)
    reports: list[T] = []
    for number, line in _whole_lines(path):
        try:
            reports.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise BadMetrics(f"{path}, line {number}: {error}") from error
    return reports


class _JsonLines(Generic[T]):
    def __init__(self, path: Path, resume_at: int) -> None:
        self.path = path
        self._file = AppendFile(path)
        self._resume_at = resume_at
        self._encoder = msgspec.json.Encoder()

    def open(self) -> None:
        if self.path.exists():
            replace_file(self.path, _lines_up_to(self.path, self._resume_at))
        self._file.open()

    def write(self, records: Sequence[T], /) -> None:
        self._file.write(self._encoder.encode_lines(records))

    def close(self) -> None:
        self._file.close()


class _StepOnly(Struct):
    step: int


def _lines_up_to(path: Path, step: int) -> Iterator[bytes]:
    decoder = msgspec.json.Decoder(_StepOnly)
    for number, line in _whole_lines(path):
        try:
            keep = decoder.decode(line).step <= step
        except msgspec.MsgspecError as error:
            raise BadMetrics(f"{path}, line {number}: {error}") from error
        if keep:
            yield line


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines with their newline. A last one without it was cut short by a crash and is left out."""
    if path.exists():
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield number, line
