"""The replay buffer as a state machine: permits in use always equal live groups, whatever is cancelled when."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from controller.buffer import GroupState, IllegalTransition, ReplayBuffer
from controller.records import PromptGroup, SampleRow, TrainSample
from workers.environments.base import Prompt

CAPACITY = 4


def group(group_id: str, version: int = 0) -> PromptGroup:
    return PromptGroup(
        group_id=group_id, prompt=Prompt(id=f"p-{group_id}"), start_version=version, rollout_ids=(f"{group_id}.0",)
    )


def sample(group_id: str, *, valid: bool = True) -> TrainSample:
    rows = (SampleRow(key=f"{group_id}.0", length=3, loss_tokens=1),) if valid else ()
    return TrainSample(rollout_id=f"{group_id}.0", reward=1.0, metrics={}, rows=rows)


class BufferMachine(RuleBasedStateMachine):
    """Drives the buffer beside a model (id -> state); reservations may be cancelled while they wait for a permit."""

    groups = Bundle("groups")

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, GroupState] = {}
        self.ended = 0
        self.next = 0

    @initialize()
    def start(self) -> None:
        self.portal_cm = anyio.from_thread.start_blocking_portal("asyncio")
        self.portal = self.portal_cm.__enter__()
        self.buffer = self.portal.call(self._make)

    async def _make(self) -> ReplayBuffer:
        return ReplayBuffer(CAPACITY)

    def teardown(self) -> None:
        self.portal_cm.__exit__(None, None, None)

    def _apply(self, method: str, *args: object, **kwargs: object) -> object:
        async def call() -> object:
            return getattr(self.buffer, method)(*args, **kwargs)

        return self.portal.call(call)

    def _live(self) -> list[str]:
        return [g for g, s in self.model.items()]

    @rule(target=groups, waiters=st.integers(1, 3), free_first=st.booleans(), cancel=st.booleans())
    def reserve(self, waiters: int, free_first: bool, cancel: bool) -> object:
        """Several reservations wait at once; some are cancelled while waiting, or at the moment a permit comes free."""
        ids = [f"g{self.next + i}" for i in range(waiters)]
        self.next += waiters
        victim = self._live()[0] if free_first and self._live() else None

        async def go() -> None:
            async with anyio.create_task_group() as tg:
                for group_id in ids:
                    tg.start_soon(self.buffer.reserve, group_id)
                await anyio.wait_all_tasks_blocked()
                if victim is not None:
                    self.buffer.abort(victim)
                    if not cancel:
                        await anyio.wait_all_tasks_blocked()
                tg.cancel_scope.cancel()

        before = len(self.model)
        self.portal.call(go)
        if victim is not None:
            self.ended += self.model.pop(victim) is not GroupState.RESERVED
        got = [e.group_id for e in self.buffer.entries if e.group_id in ids]
        for group_id in got:
            self.model[group_id] = GroupState.RESERVED
        # What fits without waiting is granted; a permit freed just before a cancellation may or may not be used.
        at_once = min(waiters, CAPACITY - before)
        assert at_once <= len(got) <= min(waiters, at_once + (victim is not None))
        return multiple(*got)

    @rule(group_id=consumes(groups), data=st.data())
    def step(self, group_id: str, data: st.DataObject) -> None:
        """Any transition on a group: it succeeds exactly when the design's state graph has it."""
        state = self.model.get(group_id)
        moves = {
            "dispatch": ({GroupState.RESERVED}, GroupState.GENERATING),
            "begin_finalizing": ({GroupState.GENERATING}, GroupState.FINALIZING),
            "commit_finalized": ({GroupState.FINALIZING}, GroupState.READY),
            "select": ({GroupState.READY}, GroupState.SELECTED),
            "trained": ({GroupState.SELECTED}, GroupState.TRAINED),
            "evict": ({GroupState.READY}, GroupState.EVICTED),
            "drop": ({GroupState.GENERATING, GroupState.FINALIZING}, GroupState.DROPPED),
            "abort": (set(GroupState) - {GroupState.TRAINED}, GroupState.ABORTED),
        }
        while state is not None:
            name = data.draw(st.sampled_from(sorted(moves)))
            allowed, to = moves[name]
            args: tuple[object, ...] = (group_id,)
            kwargs: dict[str, object] = {}
            if name == "dispatch":
                args, kwargs = (group(group_id),), {"target_step": 0}
            elif name == "commit_finalized":
                args = (group_id, [sample(group_id)])
            elif name == "select":
                args = ([group_id],)
            if state not in allowed:
                with pytest.raises(IllegalTransition):
                    self._apply(name, *args, **kwargs)
                return
            self._apply(name, *args, **kwargs)
            if to in (GroupState.TRAINED, GroupState.EVICTED, GroupState.DROPPED, GroupState.ABORTED):
                self.ended += self.model.pop(group_id) is not GroupState.RESERVED
                with pytest.raises(IllegalTransition):
                    self._apply("abort", group_id)
                return
            state = self.model[group_id] = to

    @rule(data=st.data())
    def select_is_all_or_none(self, data: st.DataObject) -> None:
        if not self.model:
            return
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, min_size=1))
        if all(self.model[g] is GroupState.READY for g in chosen):
            self._apply("select", chosen)
            for g in chosen:
                self.model[g] = GroupState.SELECTED
        else:
            with pytest.raises(IllegalTransition):
                self._apply("select", chosen)

    @rule()
    def cancelled_waiters_leave_nothing(self) -> None:
        async def go() -> None:
            with anyio.move_on_after(0):
                await self.buffer.wait_until(lambda: False)

        self.portal.call(go)

    @invariant()
    def permits_equal_live_groups(self) -> None:
        if not hasattr(self, "buffer"):
            return
        assert self.buffer.permits_in_use == len(self.buffer.entries) == len(self.model) <= CAPACITY
        assert {e.group_id: e.state for e in self.buffer.entries} == self.model
        for state in GroupState:
            found = {e.group_id for e in self.buffer.entries.of(state)}
            assert found == {group_id for group_id, there in self.model.items() if there is state}
            assert self.buffer.entries.count(state) == len(found)
        assert self.buffer.ended.total() == self.ended


BufferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_buffer_state_machine = BufferMachine.TestCase


@pytest.mark.anyio
async def test_a_waiter_sees_a_change_made_between_two_looks() -> None:
    buffer = ReplayBuffer(1)
    seen: list[int] = []

    async def wait() -> None:
        await buffer.wait_until(lambda: bool(buffer.entries))
        seen.append(len(buffer.entries))

    async with anyio.create_task_group() as tg:
        tg.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        await buffer.reserve("g0")
    assert seen == [1]


@pytest.mark.anyio
async def test_a_group_without_a_valid_sample_cannot_become_ready() -> None:
    buffer = ReplayBuffer(1)
    await buffer.reserve("g0")
    buffer.dispatch(group("g0"), target_step=0)
    buffer.begin_finalizing("g0")
    with pytest.raises(IllegalTransition, match="no valid sample"):
        buffer.commit_finalized("g0", [sample("g0", valid=False)])
    buffer.drop("g0")
    assert buffer.permits_in_use == 0
