"""`Frame`: all that one redraw of the display shows. Built on the loop, drawn in a thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from controller.reporting.evaluation_report import EvaluationReport
from controller.reporting.step_report import StepReport


class ProgressSnapshot(Struct, frozen=True, kw_only=True):
    """The state of a running loop, taken four times a second: reading counters is all that it may cost."""

    step: int
    """Finished optimizer steps."""
    activity: str
    """What the train pump does or waits for, e.g. `waiting for rollouts (5 of 16 groups)`."""
    activity_since: float
    """On `time.monotonic()`'s clock."""
    rollouts: Mapping[str, int]
    """Rollouts in flight by phase: generating, scoring, finalizing."""
    buffer: Mapping[str, int]
    """Groups by state."""
    weight_version: int
    held_up_by: str = ""
    """The likely culprit, when the activity takes long."""


class Line(Struct, frozen=True, kw_only=True):
    """Text that stays on the screen, above the live display. `source` is empty or a worker's name."""

    time: float
    kind: Literal["note", "warning", "worker"]
    source: str
    text: str


class Frame(Struct, frozen=True, kw_only=True):
    name: str
    steps: int
    step: int
    elapsed_s: float
    activity: str
    activity_s: float
    snapshot: ProgressSnapshot | None
    latest: StepReport | None
    rewards: tuple[float, ...]
    """Mean rewards of recent steps, the last one newest."""
    evaluations: tuple[EvaluationReport, ...] = ()
    """The run's first and latest."""
    eta_s: float | None
    warnings: tuple[Line, ...]
    """The last few."""


class View(Protocol):
    """How frames and lines come on the screen. Its methods run in one thread and may block; `OSError` means that the
    screen has gone."""

    def due(self, quiet_s: float) -> bool:
        """Whether to draw although there is no new line and nothing was drawn for `quiet_s` seconds."""
        ...

    def draw(self, frame: Frame, lines: Sequence[Line | StepReport]) -> None: ...

    def close(self, frame: Frame, farewell: str) -> None:
        """Leaves the terminal as it was found, with the last frame on it and `farewell` below."""
        ...
