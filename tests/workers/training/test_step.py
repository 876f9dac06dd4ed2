"""The order of the step API, as a property: whatever is called, a step trains all its rows exactly once or not at all."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.training.api import BeginStep, Microbatch, TrainRow
from workers.training.errors import OutOfOrder
from workers.training.step import Phase, StepState

ROWS = [TrainRow(key=f"r{i}", advantage=0.0, length=4) for i in range(6)]
OFFSETS = st.sampled_from([0, 0, 0, 0, 0, 1, -1])
"""Mostly the step that is current."""
RARELY = st.sampled_from([False] * 6 + [True])


class Boom(Exception):
    pass


class StepOrder(RuleBasedStateMachine):
    """Compares StepState with a model that says for each call whether it must be accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.state = StepState()
        self.phase, self.step = Phase.IDLE, 0
        self.totals = (0, 0)
        self.indices: set[int] = set()
        self.keys: list[str] = []

    def call(self, allowed: bool, function: object, *args: object) -> bool:
        """Call; it must raise OutOfOrder exactly when it is not allowed."""
        if allowed:
            function(*args)  # type: ignore[operator]
        else:
            with pytest.raises(OutOfOrder):
                function(*args)  # type: ignore[operator]
        return allowed

    @rule(offset=OFFSETS, sequences=st.integers(0, 3), restart=RARELY)
    def begin(self, offset: int, sequences: int, restart: bool) -> None:
        step = self.step + offset
        allowed = (
            step == self.step
            and sequences > 0
            and (self.phase is Phase.IDLE or restart)
            and self.phase is not Phase.LOST
        )
        request = BeginStep(step=step, loss_tokens=3 * sequences, sequences=sequences, restart=restart)
        if self.call(allowed, self.state.begin, request):
            self.phase, self.totals = Phase.OPEN, (3 * sequences, sequences)
            self.indices, self.keys = set(), []

    @rule(offset=OFFSETS, index=st.integers(0, 5), rows=st.lists(st.sampled_from(ROWS), max_size=2), fails=RARELY)
    def microbatch(self, offset: int, index: int, rows: list[TrainRow], fails: bool) -> None:
        step, keys = self.step + offset, [row.key for row in rows]
        allowed = (
            self.phase is Phase.OPEN
            and step == self.step
            and len(keys) > 0
            and index not in self.indices
            and len(set(keys + self.keys)) == len(keys) + len(self.keys)
        )
        request = Microbatch(step=step, index=index, partition="train", rows=tuple(rows))
        if not self.call(allowed, self.state.admit, request):
            return
        if fails:
            with pytest.raises(Boom), self.state.breaks_step():
                raise Boom
            self.phase = Phase.BROKEN
            return
        self.state.trained(request, tokens=3 * len(rows))
        self.indices.add(index)
        self.keys += keys

    @rule()
    def train_what_is_missing(self) -> None:
        missing = [row for row in ROWS if row.key not in self.keys][: self.totals[1] - len(self.keys)]
        if self.phase is Phase.OPEN and missing:
            self.microbatch(0, max(self.indices, default=0) + 1, missing, False)

    @rule(offset=OFFSETS, fails=RARELY)
    def finish(self, offset: int, fails: bool) -> None:
        step = self.step + offset
        complete = (3 * len(self.keys), len(self.keys)) == self.totals
        if not self.call(
            self.phase is Phase.OPEN and step == self.step and complete, self.state.require_complete, step
        ):
            return
        if fails:
            with pytest.raises(Boom), self.state.moves_weights():
                raise Boom
            self.phase = Phase.LOST
            return
        self.state.finished()
        self.phase, self.step = Phase.IDLE, self.step + 1

    @rule(step=st.integers(0, 4))
    def load(self, step: int) -> None:
        self.state.reset(step)
        self.phase, self.step = Phase.IDLE, step

    @rule(offset=OFFSETS)
    def save_and_logprobs(self, offset: int) -> None:
        step = self.step + offset
        self.call(self.phase is not Phase.LOST, self.state.require_weights, "save")
        self.call(step == self.step, self.state.require_current, "logprobs", step)

    @invariant()
    def agrees(self) -> None:
        assert (self.state.phase, self.state.step) == (self.phase, self.step)


TestStepOrder = StepOrder.TestCase
TestStepOrder.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def opened(sequences: int = 2) -> StepState:
    state = StepState()
    state.begin(BeginStep(step=0, loss_tokens=3 * sequences, sequences=sequences))
    return state


def one(index: int, *keys: str, step: int = 0) -> Microbatch:
    return Microbatch(
        step=step, index=index, partition="p", rows=tuple(TrainRow(key=k, advantage=0.0, length=4) for k in keys)
    )


def test_errors_say_what_was_expected():
    state = StepState()
    with pytest.raises(OutOfOrder, match="train_microbatch: step 0 is next and not begun"):
        state.admit(one(0, "a"))
    with pytest.raises(OutOfOrder, match="finish_step: step 0 is next and not begun"):
        state.require_complete(0)
    state = opened()
    with pytest.raises(OutOfOrder, match="train_microbatch: step 3 is out of order, step 0 is open"):
        state.admit(one(0, "a", step=3))
    with pytest.raises(OutOfOrder, match="begin_step: step 0 is open; restart=True drops"):
        state.begin(BeginStep(step=0, loss_tokens=1, sequences=1))
    with pytest.raises(OutOfOrder, match="has no rows"):
        state.admit(one(0))


def test_no_row_is_trained_twice():
    state = opened()
    state.admit(one(0, "a"))
    state.trained(one(0, "a"), tokens=3)
    with pytest.raises(OutOfOrder, match="microbatch 0 of step 0 is trained already"):
        state.admit(one(0, "b"))
    with pytest.raises(OutOfOrder, match=r"rows would be trained twice, e\.g\. 'a'"):
        state.admit(one(1, "a", "b"))
    with pytest.raises(OutOfOrder, match=r"rows would be trained twice, e\.g\. 'b'"):
        state.admit(one(1, "b", "b"))


def test_a_step_with_rows_missing_does_not_finish():
    state = opened()
    state.trained(one(0, "a"), tokens=3)
    with pytest.raises(OutOfOrder, match=r"begun with 6 loss tokens in 2 sequences, but its 1 microbatch.* had 3 in 1"):
        state.require_complete(0)
