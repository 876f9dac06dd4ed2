"""The scheduler as a state machine: rows stay dense, order is kept, and the row copies it asks for are right."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ledger.records import Sampling, WeightSpan
from workers.generation.scheduler import Request, RequestState, Scheduler

MAX_ROWS, MAX_PROMPT_TOKENS = 4, 10


def request(name: str = "r", prompt: int = 1, max_tokens: int = 3) -> Request:
    return Request(
        request_id=name,
        tokens=[0] * prompt,
        sampling=Sampling(max_tokens=max_tokens),
        max_len=prompt + max_tokens,
        stop=frozenset([99]),
        rng=np.random.default_rng(0),
    )


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(max_rows=MAX_ROWS, max_prompt_tokens=MAX_PROMPT_TOKENS)
        self.live: list[Request] = []
        self.memory: dict[int, Request] = {}
        """Stands for the KV cache: whose keys each row holds."""

    @rule(prompt=st.integers(1, 12))
    def add(self, prompt: int) -> None:
        new = request(str(len(self.live)), prompt)
        self.live.append(new)
        self.scheduler.add(new)

    @rule()
    def admit(self) -> None:
        waiting = list(self.scheduler.waiting)
        admitted = self.scheduler.admit(version=0)
        assert [r for _, r in admitted] == waiting[: len(admitted)], "first come, first served"
        assert len(admitted) <= 1 or sum(len(r.tokens) for _, r in admitted) <= MAX_PROMPT_TOKENS
        assert admitted or not waiting or len(self.scheduler.running) == MAX_ROWS, "someone is always admitted"
        self.memory.update(admitted)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(self.live), unique=True)) if self.live else []
        moves = self.scheduler.remove(gone)
        assert not {source for source, _ in moves} & {target for _, target in moves}
        for source, target in moves:
            self.memory[target] = self.memory[source]
        self.live = [r for r in self.live if r not in gone]
        assert self.scheduler.remove(gone) == []

    @invariant()
    def every_live_request_is_in_one_place_and_its_row_is_its_own(self) -> None:
        places = [*self.scheduler.running, *self.scheduler.waiting]
        assert sorted(map(id, places)) == sorted(map(id, self.live))
        assert len(self.scheduler.running) <= MAX_ROWS
        for row, running in enumerate(self.scheduler.running):
            assert self.memory[row] is running
            assert running.state is RequestState.RUNNING


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_spans_follow_the_weights_and_skip_versions_that_sampled_nothing() -> None:
    r = request(max_tokens=9)
    r.start(1)
    r.reweigh(2)
    r.append(5, -1.0)
    r.append(6, -1.0)
    r.reweigh(3)
    r.reweigh(4)
    r.append(7, -1.0)
    r.reweigh(5)
    got = r.finish()
    assert got.weight_spans == (WeightSpan(2, 0, 2), WeightSpan(4, 2, 3))
    assert (got.token_ids, got.finish_reason) == ([5, 6, 7], "abort")


def test_a_request_ends_at_a_stop_token_or_at_its_length() -> None:
    r = request(prompt=2, max_tokens=2)
    r.start(0)
    assert (r.append(99, -1.0), r.finish().finish_reason) == (True, "stop")
    r = request(prompt=2, max_tokens=2)
    r.start(0)
    assert not r.append(1, -1.0)
    assert (r.append(2, -1.0), r.finish().finish_reason) == (True, "length")


def test_illegal_transitions_raise() -> None:
    r = request()
    with pytest.raises(RuntimeError, match="WAITING, not RUNNING"):
        r.reweigh(1)
    r.start(0)
    with pytest.raises(RuntimeError, match="RUNNING, not WAITING"):
        r.start(0)
    r.finish()
    with pytest.raises(RuntimeError, match="finished already"):
        r.finish()
