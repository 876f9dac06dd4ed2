"""A real generation worker, on a real data plane, dies between staging a call's tokens and answering."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus

from dataplane.schema import STAGING, TRAIN
from dataplane.servers import start_servers
from dataplane.spec import PlaneSpec, connect
from ledger.errors import CallFailedError
from ledger.events import CallCommitted, CallFailed, MemoryLog
from ledger.reasons import CallFailure, Reason
from ledger.records import CallReply, CallRequest
from tests.custody.rig import House, user
from tests.models import tiny_model
from workers.generation.api import GENERATE, EngineSpec, GenerationSpec
from workers.launch import WorkerProcess, launch

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.long]

STRUCK = "g.1/1"


@asynccontextmanager
async def workers(model: Path, plane: PlaneSpec, *modules: str) -> AsyncIterator[list[WorkerProcess]]:
    """A process for each module, all started at once."""
    started: dict[str, WorkerProcess] = {}

    async def run(module: str, *, task_status: TaskStatus[None]) -> None:
        spec = GenerationSpec(name=module, model_path=str(model), engine=EngineSpec(), plane=plane)
        async with launch(module, name=module, spec=spec, env={"DIES_AFTER": STRUCK}) as started[module]:
            task_status.started()
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as starting:
            for module in modules:
                starting.start_soon(tasks.start, run, module)
        yield [started[module] for module in modules]
        tasks.cancel_scope.cancel()


async def test_a_worker_killed_between_staging_and_commit_costs_its_rollout_and_nothing_else(tmp_path: Path):
    model = tiny_model(tmp_path / "model")
    modules = ("tests.custody.dying_worker", "workers.generation")
    with anyio.fail_after(240):
        async with start_servers(timeout_s=120) as servers, workers(model, servers.spec, *modules) as (first, second):
            plane: Any = await connect(servers.spec)
            unused: Any = object()
            house = House(model, plane=plane, engine=unused)
            serving = first

            async def generate(request: CallRequest) -> CallReply:
                return await serving.client.call(GENERATE, request, timeout=60)

            house.pool.generate = generate  # type: ignore[method-assign]
            errors: list[CallFailedError] = []

            async def healthy(rollout_id: str) -> None:
                await house.turns(rollout_id, "ab", "ok")

            async def struck(rollout_id: str) -> None:
                nonlocal serving
                (answer,) = await house.turns(rollout_id, "ab")
                with pytest.raises(CallFailedError) as error:
                    await house.chat(rollout_id, user("ab"), answer.message, user("on"))
                errors.append(error.value)
                assert await first.wait() == -signal.SIGKILL
                assert any(key.startswith(STRUCK) for key in await house.staged()), "it died after staging"
                serving = second

            await house.play("g", healthy, struck, healthy)
            await house.finalize()

            (error,) = errors
            assert error.reason is CallFailure.GENERATION_FAILED
            assert isinstance(house.log, MemoryLog)
            (failed,) = [event for event in house.log.events if isinstance(event, CallFailed)]
            assert (failed.call_id, failed.reason) == (STRUCK, CallFailure.GENERATION_FAILED)
            committed = [e.coords.call_id for e in house.log.events if isinstance(e, CallCommitted)]
            assert committed == ["g.0/0", "g.0/1", "g.1/0", "g.2/0", "g.2/1"]
            # The first one's rows outlived the worker that staged them, the last one's came from another.
            reasons = {rollout_id: sample.reason for rollout_id, sample in house.samples().items()}
            assert reasons == {"g.0": None, "g.1": Reason.CALL_FAILED, "g.2": None}
            assert await plane.keys(STAGING) == []
            await house.train()
            assert sorted(row.key for row in house.trainer.rows) == ["g.0", "g.2"]
            assert await plane.keys(TRAIN) == []
            account = house.ledger.account
            assert (account.dispatched, account.ended, account.lost, account.duplicated) == (3, 3, 0, 0)
            await plane.aclose()
