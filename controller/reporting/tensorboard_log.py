"""Scalars in a TensorBoard event file, written with tensorboard's own record format and without torch."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from controller.reporting.files import AppendFile


class Record(Protocol):
    """Numbers of a moment of the run, by tag."""

    @property
    def step(self) -> int: ...

    @property
    def time(self) -> float: ...

    @property
    def metrics(self) -> dict[str, float]: ...


class TensorBoardSink:
    """One event file per process in `folder`. `first_step` is the next step of the run: what earlier files hold from it
    on belongs to steps that are done again, and TensorBoard discards it."""

    def __init__(self, folder: Path, first_step: int) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._file = AppendFile(self.path)
        self._first_step = first_step

    def open(self) -> None:
        self._file.open()
        events, _ = _tensorboard()
        now = time.time()
        start = events.SessionLog(status=events.SessionLog.START)
        self._append(
            [
                events.Event(wall_time=now, file_version="brain.Event:2"),
                events.Event(wall_time=now, step=self._first_step, session_log=start),
            ]
        )

    def write(self, records: Sequence[Record], /) -> None:
        self._append([_event(report) for report in records])

    def close(self) -> None:
        self._file.close()

    def _append(self, events: Sequence[Any]) -> None:
        _, record_writer = _tensorboard()
        buffer = io.BytesIO()
        records = record_writer(buffer)
        for event in events:
            records.write(event.SerializeToString())
        self._file.write(buffer.getvalue())


def _event(report: Record) -> Any:
    from tensorboard.compat.proto import summary_pb2

    summary: Any = summary_pb2
    values = [summary.Summary.Value(tag=tag, simple_value=value) for tag, value in report.metrics.items()]
    events, _ = _tensorboard()
    return events.Event(wall_time=report.time, step=report.step, summary=summary.Summary(value=values))


def _tensorboard() -> tuple[Any, Any]:
    """The event messages and the record writer; imported late, in the writer's thread."""
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    return event_pb2, RecordWriter
