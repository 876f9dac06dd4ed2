"""Samplers, driven by a small simulated run: the staleness bound holds, and no group is lost without a reason."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller.buffer import GroupEntry, GroupState
from controller.records import PromptGroup
from controller.samplers import BufferView, InOrder, Sampler, Windowed
from workers.environments.base import Prompt


class SimulatedRun:
    """Dispatches whenever admitted, finishes groups in random order, trains when a batch can be selected."""

    def __init__(
        self, sampler: Sampler, *, steps: int, seed: int, prompts: int | None = None, drop_rate: float = 0.0
    ) -> None:
        self.sampler, self.steps, self.rng, self.drop_rate = sampler, steps, random.Random(seed), drop_rate
        self.prompts_left = prompts
        self.step = self.version = self.count = 0
        self.live: list[GroupEntry] = []
        self.batches: list[list[GroupEntry]] = []
        self.staleness: list[int] = []
        self.evicted = self.dropped = 0

    def view(self) -> BufferView:
        return BufferView(
            step=self.step,
            version=self.version,
            last_step=self.steps,
            entries=self.live,
            exhausted=self.prompts_left == 0,
        )

    def dispatch(self) -> bool:
        target = self.sampler.admit(self.view())
        if target is None or self.prompts_left == 0:
            return False
        if self.prompts_left is not None:
            self.prompts_left -= 1
        gid = f"g{self.count}"
        group = PromptGroup(group_id=gid, prompt=Prompt(id=gid), start_version=self.version, rollout_ids=())
        self.live.append(GroupEntry(gid, self.count, GroupState.GENERATING, group, target))
        self.count += 1
        assert len(self.live) <= self.sampler.required_capacity()
        return True

    def finish_one(self) -> bool:
        running = [e for e in self.live if e.state is GroupState.GENERATING]
        if not running:
            return False
        entry = self.rng.choice(running)
        if self.rng.random() < self.drop_rate:
            self.live.remove(entry)
            self.dropped += 1
        else:
            entry.state = GroupState.READY
        return True

    def train(self) -> bool:
        evicted = self.sampler.evict(self.view())
        self.live = [e for e in self.live if e.group_id not in evicted]
        self.evicted += len(evicted)
        chosen = self.sampler.select(self.view())
        if not chosen:
            return bool(evicted)
        batch = [e for e in self.live if e.group_id in chosen]
        for entry in batch:
            assert entry.state is GroupState.READY
            entry.state = GroupState.SELECTED
        while self.rng.random() < 0.5 and self.dispatch():  # dispatch goes on during training
            pass
        self.staleness += [self.step - e.dispatched.start_version for e in batch]
        self.batches.append(batch)
        self.live = [e for e in self.live if e not in batch]
        self.step += 1
        while self.rng.random() < 0.5 and self.dispatch():  # and while weights are not yet synchronised
            pass
        self.version = self.step
        return True

    def run(self) -> None:
        while self.step < self.steps:
            moved = self.dispatch() if self.rng.random() < 0.6 else self.finish_one()
            moved = (self.rng.random() < 0.3 and self.train()) or moved
            if not moved and not (self.dispatch() or self.finish_one() or self.train()):
                assert self.prompts_left == 0, f"deadlock at step {self.step} with {self.live}"
                return


samplers = st.one_of(
    st.builds(Windowed, st.integers(1, 5), st.integers(0, 3)),
    st.builds(Windowed, st.integers(1, 5), st.integers(1, 3), st.floats(1.0, 2.0)),
    st.builds(InOrder, st.integers(1, 5), st.integers(0, 3)),
)


@given(samplers, st.integers(0, 10**6), st.sampled_from([0.0, 0.2]))
@example(Windowed(2, 1, 1.25), 170, 0.0)  # a surplus group that becomes ready when it is too old already
@settings(max_examples=200, deadline=None)
def test_every_step_trains_a_full_batch_within_the_staleness_bound(
    sampler: Sampler, seed: int, drop_rate: float
) -> None:
    run = SimulatedRun(sampler, steps=8, seed=seed, drop_rate=drop_rate)
    run.run()
    assert [len(b) for b in run.batches] == [sampler.groups_per_step] * 8
    assert max(run.staleness) <= sampler.max_staleness  # pyright: ignore
    trained = sum(map(len, run.batches))
    assert run.count == trained + run.evicted + run.dropped + len(run.live)


@given(samplers, st.integers(0, 10**6), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_a_finite_prompt_list_is_trained_to_its_end(sampler: Sampler, seed: int, prompts: int) -> None:
    run = SimulatedRun(sampler, steps=1000, seed=seed, prompts=prompts)
    run.run()
    assert sum(map(len, run.batches)) + run.evicted + len(run.live) == prompts
    assert not run.live


@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_without_over_sampling_no_group_is_evicted_for_being_slow(groups: int, staleness: int, seed: int) -> None:
    run = SimulatedRun(Windowed(groups, staleness), steps=10, seed=seed)
    run.run()
    assert run.evicted == 0


def test_in_order_batches_are_exactly_the_dispatch_order() -> None:
    run = SimulatedRun(InOrder(3, 2), steps=10, seed=1)
    run.run()
    assert [e.order for b in run.batches for e in b] == list(range(30))


@pytest.mark.parametrize("sampler", [Windowed(2, 0), InOrder(2, 0)])
def test_on_policy_dispatches_nothing_between_selection_and_the_new_weights(sampler: Sampler) -> None:
    run = SimulatedRun(sampler, steps=3, seed=0)
    while run.dispatch():
        pass
    assert len(run.live) == 2
    for entry in run.live:
        entry.state = GroupState.SELECTED
    assert sampler.admit(run.view()) is None
    run.live, run.step = [], 1
    assert sampler.admit(run.view()) is None
    run.version = 1
    assert sampler.admit(run.view()) == 1
