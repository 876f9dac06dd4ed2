"""A worker's states: whatever happens to it in whatever order, it serves only what it has acknowledged."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controller.member import IllegalTransition, Member, Quarantined, VersionMismatch, Weights, WorkerState
from tests.controller.fleet.fakes import FakeWorker, call, serving
from workers.generation.api import WeightsLoaded

pytestmark = pytest.mark.anyio

S = WorkerState
ALLOWED = {
    S.JOINING: {"serve", "quarantine"},
    S.SERVING: {"suspect", "quarantine"},
    S.SUSPECT: {"serve", "quarantine"},
    S.QUARANTINED: {"recover", "retire"},
    S.RECOVERING: {"serve", "quarantine", "retire"},
    S.RETIRED: set[str](),
}


class MemberMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        unused: Any = None
        self.member = Member("m", unused)
        self.acknowledged: int | None = None
        self.moves: list[tuple[WorkerState, WorkerState]] = []
        self.member.on_move = lambda member, before: self.moves.append((before, member.state))

    @rule(version=st.integers(0, 3))
    def acknowledge(self, version: int) -> None:
        if self.member.state not in (S.QUARANTINED, S.RETIRED):
            self.member.version = self.acknowledged = version

    @rule(step=st.sampled_from(["serve", "quarantine", "recover", "retire"]))
    def step(self, step: str) -> None:
        before = self.member.state
        legal = step in ALLOWED[before] and (step != "serve" or self.acknowledged is not None)
        try:
            getattr(self.member, step)("told to")
        except IllegalTransition:
            assert not legal
            assert self.member.state is before
        else:
            assert legal
            if step == "quarantine":
                self.acknowledged = None

    @rule()
    def suspect(self) -> None:
        before = self.member.state
        self.member.doubt("a call failed")
        assert self.member.state is (S.SUSPECT if before is S.SERVING else before)
        assert self.member.doubted.is_set()

    @rule(hopeless=st.booleans())
    def take_out(self, hopeless: bool) -> None:
        before = self.member.state
        self.member.take_out("two signs at once", hopeless=hopeless)
        assert self.member.state is (before if before in (S.QUARANTINED, S.RETIRED) else S.QUARANTINED)
        self.acknowledged = None if before is not S.RETIRED else self.acknowledged

    @invariant()
    def only_what_was_acknowledged_is_served(self) -> None:
        if self.member.state in (S.SERVING, S.SUSPECT):
            assert self.member.version is not None
            assert self.member.version == self.acknowledged
        assert self.member.has_room == (self.member.state is S.SERVING)

    @invariant()
    def moves_are_told_in_order(self) -> None:
        for (_, after), (before, _) in zip(self.moves, self.moves[1:], strict=False):
            assert after is before
        assert all(before is not S.RETIRED for before, _ in self.moves)


TestMember = MemberMachine.TestCase
TestMember.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


async def test_whatever_waits_for_a_worker_is_told_of_its_quarantine_at_once():
    (worker,), (member,) = serving("w")
    worker.wedged = True
    ends: list[str] = []

    async def wait() -> None:
        with pytest.raises(Quarantined, match="told to"):
            await member.generate(call(), timeout=60)
        ends.append("told")

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tg:
            tg.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            member.quarantine("told to")
    assert ends == ["told"]
    assert worker.running == 0, "and the call was cancelled there"
    with pytest.raises(Quarantined):
        await member.generate(call(), timeout=60)


async def test_a_reply_that_comes_in_the_turn_of_the_quarantine_is_none():
    came = anyio.Event()

    class Answers:
        async def call(self, method: Any, request: Any, *, timeout: float) -> WeightsLoaded:
            await came.wait()
            return WeightsLoaded(version=7, seconds=0.0)

    member = Member("w", Answers())  # type: ignore[arg-type]

    async def load() -> None:
        with pytest.raises(Quarantined, match="told to"):
            await member.load(Weights(7, "/weights"), timeout=60)

    async with anyio.create_task_group() as tg:
        tg.start_soon(load)
        await anyio.wait_all_tasks_blocked()
        came.set()
        member.quarantine("told to")
    assert member.version is None


async def test_a_load_counts_only_when_the_version_is_the_one_that_was_asked_for(tmp_path: Any):
    worker = FakeWorker("w")
    member = Member("w", worker)  # type: ignore[arg-type]
    with pytest.raises(VersionMismatch, match="serves weight version 0, not 7"):
        await member.load(Weights(7), timeout=1)
    assert member.version is None
    await member.load(Weights(0), timeout=1)
    assert (member.version, member.loads, member.loading) == (0, 2, 0)
