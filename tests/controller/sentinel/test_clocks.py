"""Which part of a silence the loop is answerable for."""

from __future__ import annotations

import pytest

from controller.sentinel.clocks import Slice, blocked_s


@pytest.mark.parametrize(
    ("what", "turn", "blocked"),
    [
        ("it slept in a system call, the sentinel was on time", Slice(0.02, 0.02, 0, 0, 0), 0.02),
        ("it computed and kept the interpreter", Slice(0.02, 5.0, 4.9, 0, 0), 4.92),
        ("another thread computed and kept the interpreter", Slice(0.02, 5.0, 0, 0, 4.9), 4.92),
        ("the process was stopped", Slice(0.02, 5.0, 0, 0, 0), 0.02),
        ("the machine gave nobody a CPU", Slice(0.02, 0.5, 0.0, 0.48, 0), 0.02),
        ("the machine gave the loop's thread no CPU", Slice(0.02, 0.021, 0.001, 0.02, 0), 0.001),
        ("it computed on half a CPU", Slice(0.02, 1.0, 0.5, 0.5, 0), 0.5),
    ],
)
def test_only_what_is_not_the_machines_doing_counts(what: str, turn: Slice, blocked: float) -> None:
    assert blocked_s(turn) == pytest.approx(blocked), what
