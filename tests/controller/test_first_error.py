"""What a run's end is told with, of the errors that came together."""

from __future__ import annotations

from asyncio import CancelledError

from controller.first_error import first_error
from dataplane.errors import DataPlaneDown
from workers.launch import WorkerDied


def test_the_first_error_is_told() -> None:
    first, later = ValueError("first"), ValueError("later")
    assert first_error(first) is first
    assert first_error(BaseExceptionGroup("", [ExceptionGroup("", [first]), later])) is first


def test_a_death_is_told_before_what_it_caused() -> None:
    death = WorkerDied("training", -9, log=())
    assert first_error(ExceptionGroup("", [ValueError(), death])) is death


def test_a_cancellation_is_told_only_if_there_is_nothing_else() -> None:
    cancelled, down = CancelledError("via cancel scope"), DataPlaneDown("storage unit 0 was killed")
    assert first_error(BaseExceptionGroup("", [cancelled, ExceptionGroup("", [down])])) is down
    assert first_error(cancelled) is cancelled
