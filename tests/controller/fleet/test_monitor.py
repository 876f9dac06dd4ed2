"""The fleet monitor: each sign of trouble takes a worker out, and only the handshake brings it back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from controller.config.schema import FailuresConfig, FleetConfig
from controller.first_error import first_error
from controller.fleet_monitor import FleetLost, FleetMonitor, RestartBudget, TokenProgress
from controller.generation_pool import GenerationPool
from controller.member import Member, Weights, WorkerState
from controller.waiting import Activities
from tests.controller.fleet.fakes import FakeWorker, call, failure
from workers.generation.engine import EngineStats

pytestmark = pytest.mark.anyio

S = WorkerState
CONFIG = {
    "probe_every_s": 0.05,
    "probe_timeout_s": 0.1,
    "missed_probes": 2,
    "stalled_after_s": 0.3,
    "restart_after_s": 5.0,
    "failed_calls": 3,
    "restart_window_s": 60.0,
}


class Rig:
    def __init__(self, *names: str, version: int = 0, load_timeout_s: float = 2.0, **config: Any) -> None:
        self.workers = [FakeWorker(name) for name in names]
        self.members = [Member(worker.name, worker) for worker in self.workers]  # type: ignore[arg-type]
        for worker in self.workers:
            worker.version = version
        self.pool = GenerationPool(
            self.members,
            call_timeout_s=30,
            on_call=lambda *_: None,
            failures=FailuresConfig(backoff_s=0.01, max_backoff_s=0.05, call_attempts=10),
            weights=Weights(version),
        )
        self.states: list[tuple[str, str]] = []
        self.activities = Activities()
        by_name: Any = {worker.name: worker for worker in self.workers}
        self.monitor = FleetMonitor(
            self.pool,
            by_name,
            config=FleetConfig(**(CONFIG | config)),
            load_timeout_s=load_timeout_s,
            activities=self.activities,
            on_state=lambda name, state, *_: self.states.append((name, state)),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Rig]:
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tg:
                tg.start_soon(self.monitor.run)
                for member in self.members:
                    await member.until(S.SERVING)
                yield self
                tg.cancel_scope.cancel()


async def test_a_dead_worker_is_restarted_and_serves_the_present_weights():
    async with Rig("a").running() as rig:
        await rig.pool.load_weights(Weights(5, "/w"), timeout=1)
        rig.workers[0].die()
        await rig.members[0].until(S.QUARANTINED)
        assert "died, signal SIGKILL" in rig.members[0].why
        await rig.members[0].until(S.SERVING)
        assert (rig.workers[0].starts, rig.workers[0].version) == (2, 5)
        assert rig.monitor.counts == {"quarantined": 1, "restarted": 1}
        assert ("a", "recovering") in rig.states
        await anyio.wait_all_tasks_blocked()
        assert rig.activities.now() == {}


async def test_a_frozen_worker_is_taken_out_and_comes_back_without_a_restart():
    async with Rig("a").running() as rig:
        await rig.pool.load_weights(Weights(1, "/w"), timeout=1)
        rig.workers[0].freeze()
        await rig.members[0].until(S.SUSPECT)
        await rig.members[0].until(S.QUARANTINED)
        assert "2 probes in a row without an answer" in rig.members[0].why
        rig.workers[0].thawed.set()
        await rig.members[0].until(S.SERVING)
        assert (rig.workers[0].starts, rig.workers[0].loaded) == (1, [1, 1])


async def test_one_missed_probe_is_forgiven():
    async with Rig("a").running() as rig:
        rig.workers[0].freeze()
        await rig.members[0].until(S.SUSPECT)
        rig.workers[0].thawed.set()
        await rig.members[0].until(S.SERVING)
        assert rig.members[0].why == "it answers again"
        assert not rig.monitor.counts


async def test_a_wedged_engine_that_answers_probes_is_restarted_and_its_calls_are_made_again():
    async with Rig("a", "b").running() as rig:
        rig.workers[0].wedged = rig.workers[1].wedged = True
        answers: list[str] = []

        async def ask(i: int) -> None:
            answers.append((await rig.pool.generate(call(f"g.{i}"))).coords.call_id)

        async with anyio.create_task_group() as tg:
            for i in range(4):
                tg.start_soon(ask, i)
        assert sorted(answers) == [f"g.{i}/0" for i in range(4)]
        assert rig.monitor.counts["restarted"] == 2
        assert all(rig.pool.trouble(f"g.{i}").attempts_lost for i in range(4))


async def test_an_engine_that_lost_its_weights_by_itself_is_found_by_its_version():
    async with Rig("a").running() as rig:
        await rig.pool.load_weights(Weights(2, "/w"), timeout=1)
        rig.workers[0].version = 0
        await rig.members[0].until(S.QUARANTINED)
        assert rig.members[0].why == "it serves weight version 0, having acknowledged 2"
        await rig.members[0].until(S.SERVING)
        assert (rig.workers[0].version, rig.workers[0].starts) == (2, 1)


async def test_a_worker_whose_calls_fail_one_after_another_is_taken_out_though_it_answers_probes():
    async with Rig("a").running() as rig:
        worker = rig.workers[0]

        def fail(_: Any) -> None:
            if len(worker.calls) == 5:
                worker.on_generate = lambda _: None
            raise failure("OSError", retryable=True)

        worker.on_generate = fail
        await rig.pool.generate(call())
        assert rig.monitor.counts["quarantined"] == 1
        assert len(worker.calls) == 6


async def test_a_worker_that_comes_back_during_a_weight_sync_gets_the_newer_version():
    async with Rig("a", "b").running() as rig:
        await rig.pool.load_weights(Weights(1, "/w1"), timeout=1)
        rig.workers[0].freeze()
        await rig.members[0].until(S.QUARANTINED)
        await rig.members[0].until(S.RECOVERING)  # It has been asked for version 1, and does not answer.
        await rig.pool.load_weights(Weights(2, "/w2"), timeout=1)
        rig.workers[0].thawed.set()
        await rig.members[0].until(S.SERVING)
        assert rig.workers[0].loaded == [1, 1, 2]
        assert rig.members[0].version == 2


async def test_a_worker_that_does_not_come_back_is_restarted_in_the_end():
    async with Rig("a", restart_after_s=0.5).running() as rig:
        rig.workers[0].freeze()
        await rig.members[0].until(S.QUARANTINED)
        await rig.members[0].until(S.SERVING)
        assert rig.workers[0].starts == 2


async def test_workers_that_cannot_be_restarted_are_given_up_and_the_run_ends_naming_them():
    rig = Rig("a", "b", max_restarts=1, min_serving=2)

    async def lose_one() -> None:
        async with rig.running():
            rig.workers[1].startable = False
            rig.workers[1].die()
            await anyio.sleep(10)

    with pytest.raises(ExceptionGroup) as caught:
        await lose_one()
    error = first_error(caught.value)
    assert isinstance(error, FleetLost)
    assert "1 of 2 generation workers are left, fleet.min_serving is 2" in str(error)
    assert "b: restarted 1 times already; worker b did not start: exit code 1" in str(error)


async def test_with_enough_left_the_run_goes_on_without_a_retired_worker():
    async with Rig("a", "b", max_restarts=0).running() as rig:
        rig.workers[0].die()
        await rig.members[0].until(S.RETIRED)
        await rig.pool.generate(call())
        assert len(rig.workers[1].calls) == 1
        assert rig.monitor.counts["retired"] == 1


def test_restarts_are_counted_within_a_window():
    budget = RestartBudget(2, 10.0)
    assert [budget.take(t) for t in (0, 1, 2, 9.9, 10, 10.5, 11)] == [True, True, False, False, True, False, True]


def test_only_an_engine_that_holds_requests_and_yields_no_token_is_stalled():
    progress = TokenProgress()

    def look(now: float, tokens: int, *, running: int = 1, loads: int = 0, loading: bool = False) -> float:
        seen = EngineStats(running=running, waiting=0, kv_usage=0, generated_tokens=tokens, weight_version=0)
        return progress.stalled_s(seen, loads, loading=loading, now=now)

    assert look(0, 5) == 0
    assert look(10, 5) == 10
    assert look(11, 6) == 0
    assert look(50, 6, running=0) == 0
    assert look(60, 6) == 10
    assert look(61, 6, loading=True) == 0
    assert look(70, 6, loads=1) == 0
    assert look(75, 6, loads=1) == 5
