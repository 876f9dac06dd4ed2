"""Samplers, driven by a small simulated run: the staleness bound holds, and no group is lost without a reason."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller.buffer import GroupEntry, GroupState, LiveGroups
from controller.in_order import InOrder
from controller.records import PromptGroup, SampleRow, TrainSample
from controller.samplers import BufferView, ReadyFirst, Sampler, WeightFifo, Windowed
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
        self.evicted = self.dropped = self.aborted = self.ready = 0
        self.dropped_for: Counter[int] = Counter()

    def view(self) -> BufferView:
        return BufferView(
            step=self.step,
            version=self.version,
            last_step=self.steps,
            entries=LiveGroups(self.live),
            exhausted=self.prompts_left == 0,
            dropped=self.dropped_for,
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
        assert gid not in self.sampler.should_abort_inflight(self.view())
        return True

    def finish_one(self) -> bool:
        running = [e for e in self.live if e.state is GroupState.GENERATING]
        if not running:
            return False
        entry = self.rng.choice(running)
        if self.rng.random() < self.drop_rate:
            self.live.remove(entry)
            self.dropped += 1
            self.dropped_for[entry.target_step or 0] += 1
        else:
            entry.state, entry.ready_order = GroupState.READY, self.ready
            entry.samples = (self.sample(entry),)
            entry.oldest_version = entry.samples[0].oldest_version
            self.ready += 1
        return True

    def sample(self, entry: GroupEntry) -> TrainSample:
        """Its oldest token may be of newer weights than those it was dispatched under."""
        oldest = self.rng.randint(entry.dispatched.start_version, self.version)
        rows = (SampleRow(key=entry.group_id, length=2, loss_tokens=1),)
        return TrainSample(rollout_id=entry.group_id, reward=0.0, metrics={}, rows=rows, oldest_version=oldest)

    def abort(self) -> None:
        hopeless = set(self.sampler.should_abort_inflight(self.view()))
        for entry in self.live:
            if entry.group_id in hopeless:
                assert entry.state is GroupState.GENERATING
                # Nothing that is done now could be trained before the next step that is to be selected.
                after = self.step + any(e.state is GroupState.SELECTED for e in self.live)
                assert after - entry.dispatched.start_version > self.sampler.max_staleness  # pyright: ignore
        self.aborted += len(hopeless)
        self.live = [e for e in self.live if e.group_id not in hopeless]

    def train(self) -> bool:
        self.abort()
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
        self.abort()
        while self.rng.random() < 0.5 and self.dispatch():  # dispatch goes on during training
            pass
        self.staleness += [self.step - self.age_from(e) for e in batch]
        self.batches.append(batch)
        self.live = [e for e in self.live if e not in batch]
        self.step += 1
        while self.rng.random() < 0.5 and self.dispatch():  # and while weights are not yet synchronised
            pass
        self.version = self.step
        return True

    def age_from(self, entry: GroupEntry) -> int:
        by_token = getattr(self.sampler, "_by_token", False)
        return entry.samples[0].oldest_version if by_token else entry.dispatched.start_version

    def run(self) -> None:
        while self.step < self.steps:
            moved = self.dispatch() if self.rng.random() < 0.6 else self.finish_one()
            moved = (self.rng.random() < 0.3 and self.train()) or moved
            if not moved and not (self.dispatch() or self.finish_one() or self.train()):
                assert self.prompts_left == 0, f"deadlock at step {self.step} with {self.live}"
                return


groups, staleness, surplus = st.integers(1, 5), st.integers(0, 3), st.floats(1.01, 2.0)
ages = st.sampled_from(["dispatch", "oldest_token"])


def samplers_of(share: float) -> st.SearchStrategy[Sampler]:
    """Every policy in every setting; a step keeps at least `share` of its groups when others are dropped."""

    def floored(policy: Callable[..., Sampler]) -> Callable[..., Sampler]:
        def made(size: int, *rest: Any, **more: Any) -> Sampler:
            return policy(size, *rest, min_groups=math.ceil(size * share), **more)

        return made

    plain = (floored(policy) for policy in (Windowed, ReadyFirst, WeightFifo, InOrder))
    return st.one_of(
        *(st.builds(policy, groups, staleness) for policy in plain),
        st.builds(floored(Windowed), groups, staleness, age=ages),
        st.builds(floored(Windowed), groups, staleness, surplus, age=ages, freshest_first=st.booleans()),
    )


samplers = samplers_of(1.0)
shrinking = st.one_of(samplers_of(0.1), samplers_of(0.5))


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
    assert run.count == trained + run.evicted + run.aborted + run.dropped + len(run.live)


@given(shrinking, st.integers(0, 10**6), st.sampled_from([0.2, 0.6]))
@settings(max_examples=200, deadline=None)
def test_steps_shrink_with_what_was_dropped_to_the_floor_and_no_further(
    sampler: Sampler, seed: int, drop_rate: float
) -> None:
    run = SimulatedRun(sampler, steps=8, seed=seed, drop_rate=drop_rate)
    run.run()
    floor: int = sampler._floor  # pyright: ignore
    sizes = [len(batch) for batch in run.batches]
    assert floor <= min(sizes)
    assert max(sizes) <= sampler.groups_per_step
    assert len(run.batches) == 8
    assert max(run.staleness) <= sampler.max_staleness  # pyright: ignore
    assert sum(sampler.groups_per_step - len(batch) for batch in run.batches) <= run.dropped


@given(st.one_of(samplers, shrinking), st.integers(0, 10**6), st.integers(0, 40), st.sampled_from([0.0, 0.2]))
@settings(max_examples=200, deadline=None)
def test_a_finite_prompt_list_is_trained_to_its_end(
    sampler: Sampler, seed: int, prompts: int, drop_rate: float
) -> None:
    run = SimulatedRun(sampler, steps=1000, seed=seed, prompts=prompts, drop_rate=drop_rate)
    run.run()
    assert sum(map(len, run.batches)) + run.evicted + run.aborted + run.dropped == prompts
    assert not run.live


@given(st.sampled_from([Windowed, WeightFifo, InOrder]), groups, staleness, st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_where_steps_wait_no_group_is_lost_for_being_slow(policy: type, per_step: int, stale: int, seed: int) -> None:
    run = SimulatedRun(policy(per_step, stale), steps=10, seed=seed)
    run.run()
    assert run.evicted == run.aborted == 0


@given(groups, staleness, st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_weights_train_in_order_with_weight_fifo(per_step: int, stale: int, seed: int) -> None:
    run = SimulatedRun(WeightFifo(per_step, stale), steps=10, seed=seed)
    run.run()
    versions = [e.dispatched.start_version for batch in run.batches for e in batch]
    assert versions == sorted(versions)


def view_of(*entries: GroupEntry, step: int = 0, dropped: dict[int, int] | None = None) -> BufferView:
    return BufferView(step=step, version=step, last_step=100, entries=LiveGroups(entries), dropped=dropped or {})


def entry(
    order: int, state: GroupState, *, version: int = 0, target: int = 0, ready: int = 0, oldest: int = 0
) -> GroupEntry:
    gid = f"g{order}"
    group = PromptGroup(group_id=gid, prompt=Prompt(id=gid), start_version=version, rollout_ids=())
    rows = (SampleRow(key=gid, length=2, loss_tokens=1),)
    sample = TrainSample(rollout_id=gid, reward=0.0, metrics={}, rows=rows, oldest_version=oldest)
    if state is GroupState.READY:
        return GroupEntry(gid, order, state, group, target, (sample,), ready, oldest)
    return GroupEntry(gid, order, state, group, target)


READY, GENERATING = GroupState.READY, GroupState.GENERATING


def test_ready_first_takes_what_was_ready_first() -> None:
    entries = [entry(0, READY, ready=2), entry(1, GENERATING), entry(2, READY, ready=0), entry(3, READY, ready=1)]
    assert ReadyFirst(2, 1).select(view_of(*entries)) == ["g2", "g3"]


def test_freshest_first_takes_the_newest_weights() -> None:
    entries = [entry(i, READY, version=i, ready=i) for i in range(3)]
    view = view_of(*entries, step=2)
    assert Windowed(1, 2, 2.0, freshest_first=True).select(view) == ["g2"]
    assert Windowed(1, 2, 2.0).select(view) == ["g0"]
    with pytest.raises(ValueError, match="over_sampling > 1"):
        Windowed(1, 2, freshest_first=True)


def test_a_group_ages_from_its_oldest_token_where_asked() -> None:
    view = view_of(entry(0, READY, version=0, oldest=2), entry(1, GENERATING, version=0), step=2)
    by_dispatch, by_token = Windowed(1, 1, 2.0), Windowed(1, 1, 2.0, age="oldest_token")
    assert (by_dispatch.select(view), by_dispatch.evict(view)) == (None, ["g0"])
    assert by_dispatch.should_abort_inflight(view) == ["g1"]
    assert (by_token.select(view), by_token.evict(view)) == (["g0"], [])
    assert by_token.should_abort_inflight(view) == []


def test_weight_fifo_waits_for_groups_of_older_weights() -> None:
    older, newer = entry(0, GENERATING, version=0), entry(1, READY, version=1)
    assert WeightFifo(1, 2).select(view_of(older, newer, step=1)) is None
    older.state = READY
    assert WeightFifo(1, 2).select(view_of(older, newer, step=1)) == ["g0"]


def test_in_order_promotes_a_ready_group_of_a_later_step_and_fills_that_step_instead() -> None:
    sampler = InOrder(2, 1)
    step = [entry(0, READY, target=0), entry(2, GENERATING, target=1), entry(3, READY, target=1)]
    assert sampler.select(view_of(*step)) == ["g0", "g3"]
    assert sampler.admit(view_of(*step)) == 1
    step[2].state = GENERATING
    assert sampler.select(view_of(*step)) is None
    assert sampler.admit(view_of(*step)) == 0


def test_a_step_that_may_shrink_is_not_filled_up() -> None:
    for sampler in (InOrder(4, 0, min_groups=2), Windowed(4, 0, min_groups=2), ReadyFirst(4, 0, min_groups=2)):
        ready = [entry(i, READY, ready=i) for i in range(3)]
        one = view_of(*ready, dropped={0: 1})
        assert (sampler.admit(one), sampler.select(one)) == (None, ["g0", "g1", "g2"])
        three = view_of(ready[0], dropped={0: 3})
        assert (sampler.admit(three), sampler.select(three)) == (0, None)


def test_in_order_batches_are_exactly_the_dispatch_order() -> None:
    run = SimulatedRun(InOrder(3, 2), steps=10, seed=1)
    run.run()
    assert [e.order for b in run.batches for e in b] == list(range(30))


@pytest.mark.parametrize("sampler", [Windowed(2, 0), ReadyFirst(2, 0), WeightFifo(2, 0), InOrder(2, 0)])
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
