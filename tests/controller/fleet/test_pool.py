"""Calls over workers that fail: made again elsewhere within their deadline, counted right, permanent failures never."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from controller.aimd import CallLimit
from controller.config.schema import FailuresConfig
from controller.generation_pool import GenerationPool
from controller.member import Member, Weights, WorkerState
from ledger.errors import CallFailedError, CallRefused
from ledger.reasons import CallFailure
from ledger.records import CallRequest, ParentCoords
from tests.controller.fleet.fakes import call, failure, serving
from workers.generation.engine import EngineStats
from workers.rpc.errors import RemoteError

pytestmark = pytest.mark.anyio

FAST = FailuresConfig(backoff_s=0.01, max_backoff_s=0.02, call_attempts=3)
PARENT = ParentCoords(call_id="g.0/0", staging_keys=(), cum_len=1, chain_hash="", cumulative_hash="", messages=1)


def pool_of(members: list[Member], *, call_timeout_s: float = 30.0) -> GenerationPool:
    return GenerationPool(members, call_timeout_s=call_timeout_s, on_call=lambda *_: None, failures=FAST)


async def test_a_call_whose_worker_dies_is_made_again_elsewhere_under_its_own_id():
    (a, b), members = serving("a", "b")

    def die(_: CallRequest) -> Any:
        a.die()
        return anyio.sleep_forever()

    a.on_generate = die
    pool = pool_of(members)
    answered = await pool.generate(call())
    assert answered.coords.call_id == "g.0/0"
    assert [(c.call_id, c.attempt) for c in (*a.calls, *b.calls)] == [("g.0/0", 0), ("g.0/0", 1)]
    assert members[0].state is WorkerState.SUSPECT
    assert members[0].doubted.is_set(), "the monitor looks at once"
    assert pool.trouble("g.0").attempts_lost
    assert not pool.trouble("g.0").lost
    assert pool.outstanding == pool.waiting == 0


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (failure("prompt_too_long", "data"), CallRefused),
        (failure("render_mismatch", "capture", retryable=True), CallFailedError),
        (failure("ValueError"), CallFailedError),
    ],
)
async def test_a_permanent_failure_is_not_tried_again(error: RemoteError, raised: type[Exception]):
    (a, b), members = serving("a", "b")

    def fail(_: CallRequest) -> None:
        raise error

    a.on_generate = b.on_generate = fail
    pool = pool_of(members)
    with pytest.raises(raised):
        await pool.generate(call())
    assert len(a.calls) + len(b.calls) == 1
    assert all(m.state is WorkerState.SERVING for m in members)
    assert not pool.trouble("g.0").lost


async def test_attempts_are_bounded_and_the_rollout_is_then_known_as_lost():
    (a,), members = serving("a")

    def fail(_: CallRequest) -> None:
        raise failure("staging_failed", retryable=True)

    a.on_generate = fail
    pool = pool_of(members)
    with pytest.raises(CallFailedError) as caught:
        await pool.generate(call())
    assert caught.value.reason is CallFailure.STAGING_FAILED
    assert [c.attempt for c in a.calls] == [0, 1, 2]
    assert "3 attempts failed" in pool.trouble("g.0").lost
    assert members[0].state is WorkerState.SERVING, "the data plane's trouble is not the worker's"
    pool.forget("g.0")
    assert not pool.trouble("g.0").attempts_lost


@pytest.mark.parametrize("kind", ["engine_dead", "engine_restarting"])
async def test_a_dead_engine_takes_its_worker_out_and_the_call_waits_for_one_that_serves(kind: str):
    (a,), members = serving("a")

    def fail(_: CallRequest) -> None:
        a.on_generate = lambda _: None
        raise failure(kind, retryable=True)

    a.on_generate = fail
    pool = pool_of(members)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tg:
            tg.start_soon(pool.generate, call())
            await members[0].until(WorkerState.QUARANTINED)
            while not pool.waiting:
                await anyio.sleep(0.01)
            members[0].recover("")
            await members[0].load(Weights(0), timeout=1)
            members[0].serve("")
            pool.wake()
    assert [c.attempt for c in a.calls] == [0, 1]


async def test_an_answer_under_weights_that_were_superseded_is_not_taken():
    (a, b), members = serving("a", "b")
    pool = pool_of(members)
    await pool.load_weights(Weights(3, "/w"), timeout=1)
    a.version = 0  # its engine came back by itself, with the weights of its start
    assert (await pool.generate(call())).coords.weight_spans[0].version == 3
    assert members[0].state is WorkerState.QUARANTINED
    assert len(b.calls) == 1


async def test_calls_go_to_the_least_busy_worker_and_continuations_to_their_own():
    (a, b), members = serving("a", "b")
    gate = anyio.Event()
    a.on_generate = b.on_generate = lambda _: gate.wait()
    pool = pool_of(members)
    async with anyio.create_task_group() as tg:
        for i in range(4):
            tg.start_soon(pool.generate, call(f"g.{i}"))
            await anyio.wait_all_tasks_blocked()
        assert [m.outstanding for m in members] == [2, 2]
        gate.set()
    home = a if any(c.rollout_id == "g.0" for c in a.calls) else b
    for seq in (1, 2):
        await pool.generate(call("g.0", seq, parent=PARENT))
    assert [c.call_id for c in home.calls][-2:] == ["g.0/1", "g.0/2"]


async def test_with_no_room_calls_wait_in_order_and_a_cancelled_one_gives_its_place_up():
    (a,), members = serving("a")
    members[0].limit = CallLimit(1)
    gate = anyio.Event()
    a.on_generate = lambda _: gate.wait()
    pool = pool_of(members)
    async with anyio.create_task_group() as tg:
        tg.start_soon(pool.generate, call("g.0"))
        await anyio.wait_all_tasks_blocked()
        async with anyio.create_task_group() as given_up:
            given_up.start_soon(pool.generate, call("g.1"))
            await anyio.wait_all_tasks_blocked()
            tg.start_soon(pool.generate, call("g.2"))
            tg.start_soon(pool.generate, call("g.3"))
            await anyio.wait_all_tasks_blocked()
            assert (pool.outstanding, pool.waiting) == (1, 3)
            given_up.cancel_scope.cancel()
        gate.set()
    assert [c.rollout_id for c in a.calls] == ["g.0", "g.2", "g.3"]
    assert (pool.outstanding, pool.waiting) == (0, 0)


async def test_a_call_that_finds_no_worker_until_its_deadline_says_so():
    _, members = serving("a")
    members[0].quarantine("it froze")
    pool = pool_of(members, call_timeout_s=0.1)
    with pytest.raises(CallFailedError, match=r"a is quarantined \(it froze\)") as caught:
        await pool.generate(call())
    assert caught.value.reason is CallFailure.GENERATION_FAILED
    assert pool.trouble("g.0").lost


async def test_a_slow_answer_of_a_healthy_worker_is_the_calls_own_affair():
    (a,), members = serving("a")
    a.on_generate = lambda _: anyio.sleep_forever()
    pool = pool_of(members, call_timeout_s=0.1)
    with pytest.raises(CallFailedError) as caught:
        await pool.generate(call())
    assert caught.value.reason is CallFailure.TIMEOUT
    assert not pool.trouble("g.0").lost
    assert a.running == pool.outstanding == 0


async def test_a_version_advances_for_the_rest_when_one_engine_fails_and_another_is_late():
    (a, b, c), members = serving("a", "b", "c")
    a.refuses = "OSError"
    b.freeze()
    pool = pool_of(members)
    await pool.load_weights(Weights(1, "/w"), timeout=0.2)
    assert [m.state for m in members] == [S.QUARANTINED, S.QUARANTINED, S.SERVING]
    assert (c.version, members[2].version, pool.weights.version) == (1, 1, 1)


async def test_what_an_engine_refused_is_not_held_against_the_one_that_came_in_its_place():
    (a, b), members = serving("a", "b")
    first, _ = members
    a.refuses = "OSError"
    b.freeze()
    pool = pool_of(members)
    async with anyio.create_task_group() as tg:
        tg.start_soon(partial(pool.load_weights, Weights(1, "/w"), timeout=10))
        await anyio.wait_all_tasks_blocked()
        first.quarantine("it died")
        first.recover("restarting it")
        b.thawed.set()
    assert first.state is S.RECOVERING


async def test_a_file_that_every_engine_refuses_is_an_error_before_the_version_moves():
    workers, members = serving("a", "b")
    for worker in workers:
        worker.refuses = "bad_weights"
    pool = pool_of(members)
    with pytest.raises(RemoteError, match="bad_weights"):
        await pool.load_weights(Weights(1, "/w"), timeout=1)
    assert pool.weights.version == 0
    assert all(m.state is S.SERVING for m in members)


S = WorkerState


def stats(**values: Any) -> EngineStats:
    return EngineStats(
        **{"running": 10, "waiting": 0, "kv_usage": 0.5, "generated_tokens": 0, "weight_version": 0} | values
    )


def test_pressure_lowers_the_number_of_calls_at_once_and_its_end_raises_it_bit_by_bit():
    limit = CallLimit(1000)
    limit.observe(stats(preemptions=1), outstanding=100)
    assert limit.now == 75
    limit.observe(stats(preemptions=2), outstanding=90)
    assert limit.now == 75, "the last decrease has not taken effect yet"
    limit.observe(stats(preemptions=3), outstanding=75)
    assert limit.now == 56
    for _ in range(3):
        limit.observe(stats(preemptions=3), outstanding=limit.now)
    assert limit.now == 56 + 3 + 3 + 3
    limit.observe(stats(preemptions=3), outstanding=10)
    assert limit.now == 65, "a limit that is not reached says nothing"
    limit.observe(stats(kv_usage=0.99, waiting=1), outstanding=65)
    assert limit.now == 48
    limit.observe(stats(waiting=11), outstanding=48)
    assert limit.now == 36


def test_the_limit_stays_within_its_bounds():
    limit = CallLimit(6)
    for n in range(1, 20):
        limit.observe(stats(preemptions=n), outstanding=limit.now)
    assert limit.now == 4
    for _ in range(20):
        limit.observe(stats(preemptions=19), outstanding=limit.now)
    assert limit.now == 6
    fixed = CallLimit(6, adapt=False)
    fixed.observe(stats(preemptions=99), outstanding=6)
    assert fixed.now == 6
