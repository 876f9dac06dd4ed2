"""`Calls` against a model: at most one run per id, for as long as somebody waits."""

from __future__ import annotations

from functools import partial

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.rpc.calls import Answer, Calls, IdReused
from workers.rpc.wire import Status

IDS = ("a", "b", "c")
STEPS = st.lists(
    st.tuples(st.sampled_from(("arrive", "leave", "finish")), st.sampled_from(IDS)), min_size=1, max_size=30
)


async def settle() -> None:
    """Let every task that can run do so (anyio.wait_all_tasks_blocked sleeps for a tenth of a second)."""
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


class Model:
    """One server's calls, with handlers that end when told; every step's outcome is checked."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self.calls = Calls(tasks)
        self.tasks = tasks
        self.runs = dict.fromkeys(IDS, 0)
        self.finish = {id_: anyio.Event() for id_ in IDS}
        self.waiting: dict[str, list[anyio.CancelScope]] = {id_: [] for id_ in IDS}
        self.expected: dict[str, str] = {}
        """Ids that have ended: with their answer, or cancelled."""
        self.seen: list[tuple[str, Status]] = []

    async def work(self, id_: str) -> Answer:
        self.runs[id_] += 1
        await self.finish[id_].wait()
        return Answer(Status.OK, id_.encode())

    async def wait(self, id_: str, scope: anyio.CancelScope) -> None:
        with scope:
            answer = await self.calls.run(id_, b"", "w", partial(self.work, id_))
            self.seen.append((id_, answer.status))
            if self.expected.get(id_, "answered") == "answered":
                assert answer == Answer(Status.OK, id_.encode())
            else:
                assert answer.status == Status.FAILED

    async def step(self, action: str, id_: str) -> None:
        if action == "arrive":
            scope = anyio.CancelScope()
            if id_ not in self.expected:
                self.waiting[id_].append(scope)
            before = len(self.seen)
            self.tasks.start_soon(self.wait, id_, scope)
            await settle()
            assert len(self.seen) - before == (id_ in self.expected)
        elif action == "leave" and self.waiting[id_]:
            self.waiting[id_].pop().cancel()
            await settle()
            if not self.waiting[id_]:
                self.expected[id_] = "cancelled"
        elif action == "finish" and self.waiting[id_]:
            self.finish[id_].set()
            await settle()
            self.expected[id_] = "answered"
            self.waiting[id_].clear()
        assert all(runs <= 1 for runs in self.runs.values())
        assert self.calls.in_flight == sum(bool(scopes) for scopes in self.waiting.values())


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_each_id_runs_once_for_as_long_as_somebody_waits(steps: list[tuple[str, str]]) -> None:
    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            model = Model(tasks)
            for action, id_ in steps:
                await model.step(action, id_)
            tasks.cancel_scope.cancel()

    anyio.run(run)


async def answer(size: int) -> Answer:
    return Answer(Status.OK, bytes(size))


@pytest.mark.anyio
@pytest.mark.parametrize("bound", [{"max_kept": 2}, {"max_kept_bytes": 25}])
async def test_only_the_latest_answers_are_kept(bound: dict[str, int]) -> None:
    runs: list[str] = []

    async def run(id_: str) -> Answer:
        runs.append(id_)
        return await answer(10)

    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks, **bound)
        for id_ in "abcbca":
            await calls.run(id_, b"", "w", partial(run, id_))
    assert runs == ["a", "b", "c", "a"]


@pytest.mark.anyio
async def test_an_answer_is_forgotten_when_it_is_old() -> None:
    runs: list[str] = []

    async def run(id_: str) -> Answer:
        runs.append(id_)
        return await answer(1)

    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks, max_age_s=-1.0)
        for id_ in "aa":
            await calls.run(id_, b"", "w", partial(run, id_))
    assert runs == ["a", "a"]


@pytest.mark.anyio
async def test_an_id_used_for_another_request_is_refused() -> None:
    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks)
        await calls.run("a", b"one", "w", partial(answer, 1))
        with pytest.raises(IdReused):
            await calls.run("a", b"two", "w", partial(answer, 1))


@pytest.mark.anyio
async def test_a_handler_that_awaits_something_cancelled_ends_its_own_call_only() -> None:
    async def strange() -> Answer:
        raise anyio.get_cancelled_exc_class()

    async with anyio.create_task_group() as tasks:
        calls = Calls(tasks)
        assert (await calls.run("a", b"", "w", strange)).status == Status.FAILED
        assert not tasks.cancel_scope.cancel_called
