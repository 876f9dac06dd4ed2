"""A real generation worker with vLLM, over RPC: calls in custody, callers that leave, a core that is killed."""

from __future__ import annotations

import os
import random
from pathlib import Path

import anyio
import pytest

from dataplane.plane import DataPlane
from dataplane.schema import STAGING
from dataplane.servers import start_servers
from dataplane.spec import connect
from ledger.records import CallRequest, Message, Sampling, WeightSpan
from tests.models import tiny_lm
from tests.needs import needs_vllm
from tests.workers.generation.vllm.engines import HEAD
from workers.generation import api
from workers.generation.api import EngineSpec, GenerationSpec
from workers.generation.engine import EngineStats
from workers.launch import launch
from workers.rpc.client import RpcClient
from workers.rpc.errors import RemoteError
from workers.rpc.method import Empty
from workers.weights import save_weights

pytestmark = [pytest.mark.anyio, needs_vllm]


def ask(n: int, *, max_tokens: int = 20) -> CallRequest:
    return CallRequest(
        rollout_id="r",
        call_id=f"r/{n}",
        messages=(Message(role="user", content="hi"),),
        sampling=Sampling(max_tokens=max_tokens, seed=n),
    )


async def test_a_worker_serves_vllm_and_outlives_its_core(model_dir: Path, tmp_path: Path) -> None:
    save_weights(tiny_lm(seed=2, **HEAD), tmp_path / "good")
    save_weights(tiny_lm(seed=2, tie_word_embeddings=False, **HEAD), tmp_path / "bad")
    async with start_servers() as servers:
        spec = GenerationSpec(
            name="gen-0", model_path=str(model_dir), engine=EngineSpec(kind="vllm"), plane=servers.spec
        )
        with anyio.fail_after(150):
            async with launch("workers.generation", name="gen-0", spec=spec, env={"OMP_NUM_THREADS": "1"}) as process:
                plane = await connect(servers.spec)
                try:
                    info = await process.client.call(api.INFO, Empty())
                    assert info == api.WorkerInfo(max_model_len=512, vocab_size=103, weight_version=0, engine="vllm")
                    await callers_that_leave(process.client, plane)
                    await new_weights(process.client, tmp_path)
                    await a_killed_core(process.client, process.pid)
                finally:
                    await plane.aclose()


async def callers_that_leave(client: RpcClient, plane: DataPlane) -> None:
    rng = random.Random(1)
    answered: list[str] = []

    async def call(n: int) -> None:
        with anyio.move_on_after(rng.uniform(0, rng.choice([0.2, 1, 5]))):
            reply = await client.call(api.GENERATE, ask(n, max_tokens=rng.randint(1, 400)))
            answered.append(reply.coords.staging_key)

    async with anyio.create_task_group() as group:
        for n in range(300):
            group.start_soon(call, n)
    while (stats := await client.call(api.STATS, Empty())).running or stats.waiting:
        await anyio.sleep(0.01)
    assert stats.kv_usage == 0
    before = await plane.keys(STAGING)
    assert {*answered} <= {*before}
    await anyio.sleep(0.3)
    assert await plane.keys(STAGING) == before, "no call that was given up goes on and stages its tokens"
    await plane.clear(STAGING, before)
    print(f"{len(answered)} of 300 callers stayed")


async def new_weights(client: RpcClient, files: Path) -> None:
    assert (await client.call(api.LOAD_WEIGHTS, api.LoadWeights(address=str(files / "good"), version=4))).version == 4
    with pytest.raises(RemoteError, match=r"bad_weights.*not in the model lm_head\.weight"):
        await client.call(api.LOAD_WEIGHTS, api.LoadWeights(address=str(files / "bad"), version=5))
    (files / "good").unlink()


async def a_killed_core(client: RpcClient, worker: int) -> None:
    failures: list[RemoteError] = []

    async def call() -> None:
        with pytest.raises(RemoteError) as failure:
            await client.call(api.GENERATE, ask(1000, max_tokens=480))
        failures.append(failure.value)

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        generated = (await stats(client)).generated_tokens
        while (await stats(client)).generated_tokens < generated + 20:
            await anyio.sleep(0.005)
        (core,) = children(worker)
        os.kill(core, 9)
    assert (failures[0].failure.kind, failures[0].failure.retryable) == ("engine_restarting", True)
    again = await client.call(api.GENERATE, ask(1000, max_tokens=480))
    assert again.coords.weight_spans == (WeightSpan(4, 0, again.completion_tokens),)
    assert ((await stats(client)).restarts, (await client.call(api.INFO, Empty())).weight_version) == (1, 4)


async def stats(client: RpcClient) -> EngineStats:
    return await client.call(api.STATS, Empty())


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
