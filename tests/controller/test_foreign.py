"""An environment cannot hold up a run, whatever it catches: neither its rollout's deadline nor the end of the run."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from controller.context import BadMessages, InLoopContext
from controller.foreign import await_foreign, stands_at
from ledger.events import MemoryLog
from ledger.gate import Gate
from ledger.ledger import Ledger
from ledger.records import CallReply, CallRequest, Sampling

pytestmark = pytest.mark.anyio

HANG_GUARD_S = 30
GRACE_S = 0.3
ASK = [{"role": "user", "content": "a"}]


class Rollout:
    """One open rollout whose model calls never come back; `running` are in the engine."""

    def __init__(self, max_calls: int = 64) -> None:
        self.ledger = Ledger(MemoryLog())
        self.calls = 0
        self.running = 0
        gate = Gate(self.ledger, self._generate, max_calls_per_rollout=max_calls, call_timeout_s=3600)
        self.context = InLoopContext(
            "g0.0", gate=gate, sampling=Sampling(max_tokens=4), base_url="http://gate", api_key="key"
        )

    async def _generate(self, request: CallRequest) -> CallReply:
        self.calls += 1
        self.running += 1
        try:
            await anyio.sleep_forever()
        finally:
            self.running -= 1
        raise AssertionError

    async def play(self, environment: Callable[[InLoopContext], Any], *, seconds: float = 0.1) -> bool:
        """Whether the deadline ended it."""
        await self.ledger.dispatched("g0", prompt_id="p", rollout_ids=("g0.0",), version=0)
        await self.ledger.open("g0.0", "g0")
        with anyio.fail_after(HANG_GUARD_S):
            with anyio.move_on_after(seconds) as deadline:
                await await_foreign(environment(self.context), "it", on_cancel=self.context.close, grace_s=GRACE_S)
        return deadline.cancelled_caught


async def test_where_it_stands_is_where_the_code_of_the_user_waits() -> None:
    async def thinks(_: InLoopContext) -> None:
        await anyio.sleep_forever()

    coroutine = thinks(Rollout().context)
    assert stands_at(coroutine).endswith("thinks")
    async with anyio.create_task_group() as tg:
        tg.start_soon(lambda: await_foreign(coroutine, "it", on_cancel=lambda: None))
        await anyio.wait_all_tasks_blocked()
        assert stands_at(coroutine) == f"{__file__}:{thinks.__code__.co_firstlineno + 1} in {thinks.__qualname__}"
        tg.cancel_scope.cancel()
    assert stands_at(coroutine) == ""


async def test_code_that_leaves_the_process_leaves_only_its_rollout() -> None:
    async def leaves(_: InLoopContext) -> None:
        raise SystemExit(7)

    with pytest.raises(RuntimeError, match=r"it called sys\.exit\(7\)"):
        await Rollout().play(leaves)


async def catches_all(context: InLoopContext) -> None:
    while True:
        try:  # noqa: SIM105
            await context.chat(ASK)
        except:  # noqa: E722
            pass


async def catches_all_deaf(context: InLoopContext) -> None:
    with anyio.CancelScope(shield=True):
        await catches_all(context)


async def sleeps_and_catches_all(_: InLoopContext) -> None:
    while True:
        try:  # noqa: SIM105
            await anyio.sleep(0.01)
        except:  # noqa: E722
            pass


@pytest.mark.parametrize("environment", [catches_all, catches_all_deaf, sleeps_and_catches_all])
async def test_code_that_swallows_everything_does_not_withstand_its_deadline(
    environment: Callable[[InLoopContext], Any], caplog: pytest.LogCaptureFixture
) -> None:
    rollout = Rollout()
    assert await rollout.play(environment)
    assert caplog.text.count("was left behind") == 1
    assert rollout.running == 0, "nothing of it runs in an engine"
    calls = rollout.calls
    await anyio.sleep(0.1)
    assert rollout.calls == calls, "and it makes no more calls"


@pytest.mark.parametrize("environment", [catches_all, catches_all_deaf])
async def test_nor_a_cancellation_from_outside(environment: Callable[[InLoopContext], Any]) -> None:
    rollout = Rollout()
    with anyio.fail_after(HANG_GUARD_S):
        async with anyio.create_task_group() as tg:
            tg.start_soon(rollout.play, environment)
            await anyio.sleep(0.05)
            tg.cancel_scope.cancel()
    assert rollout.running == 0


async def test_code_that_calls_again_at_once_after_a_refusal_does_not_block_the_loop() -> None:
    rollout = Rollout(max_calls=0)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await anyio.sleep(0.005)
            turns += 1

    async with anyio.create_task_group() as tg:
        tg.start_soon(others)
        assert await rollout.play(catches_all)
        tg.cancel_scope.cancel()
    assert turns > 2


async def test_nor_the_end_of_a_program_of_the_users_own() -> None:
    program = """
import anyio
from tests.controller.test_foreign import GRACE_S, await_foreign, sleeps_and_catches_all

async def main():
    with anyio.move_on_after(0.1):
        await await_foreign(sleeps_and_catches_all(None), "it", on_cancel=lambda: None, grace_s=GRACE_S)

anyio.run(main)
"""
    with anyio.fail_after(HANG_GUARD_S):
        await anyio.run_process([sys.executable, "-c", program])


async def test_code_that_cleans_up_is_given_the_time(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    async def cleans_up(context: InLoopContext) -> None:
        try:
            await context.chat(ASK)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.1)
                done.append("cleaned")

    assert await Rollout().play(cleans_up)
    assert (done, caplog.text) == (["cleaned"], "")


async def test_results_and_errors_come_through_as_they_are() -> None:
    async def answers(_: Any) -> str:
        await anyio.lowlevel.checkpoint()
        return "answer"

    async def fails(_: Any) -> None:
        await anyio.lowlevel.checkpoint()
        raise KeyError("mine")

    async def asks_badly(context: InLoopContext) -> None:
        await context.chat([])

    async def run(environment: Callable[[InLoopContext], Awaitable[Any]]) -> Any:
        context = Rollout().context
        return await await_foreign(environment(context), "it", on_cancel=context.close)  # type: ignore[arg-type]

    assert await run(answers) == "answer"
    with pytest.raises(KeyError, match="mine"):
        await run(fails)
    with pytest.raises(BadMessages):
        await run(asks_badly)
