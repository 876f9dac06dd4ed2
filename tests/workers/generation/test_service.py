"""A real worker process, reached over RPC, staging into a real TransferQueue."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from dataplane.errors import DataPlaneDown
from dataplane.memory import MemoryPlane
from dataplane.plane import DataPlane
from dataplane.schema import STAGING, STAGING_COLUMNS
from dataplane.servers import start_servers
from dataplane.spec import PlaneSpec, ServerAddress, connect
from ledger.links import link_of
from ledger.records import CallRequest, Message, ParentCoords, Sampling, WeightSpan
from ledger.verify import RowPlan, VerifiedRow, materialize
from tests.models import tiny_lm, tiny_model
from tests.workers.generation.helpers import load, reference_logprobs
from workers.generation import api, service
from workers.generation.api import EngineSpec, GenerationSpec
from workers.generation.engine import EngineDead
from workers.generation.model_runner import ModelRunner
from workers.host import StartupError
from workers.launch import WorkerProcess, launch
from workers.rpc.client import RpcClient
from workers.rpc.errors import HandlerError, RemoteError
from workers.rpc.method import Empty, Method
from workers.rpc.server import RpcServer
from workers.weights import save_weights

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def worker(model: Path, plane: PlaneSpec) -> AsyncIterator[WorkerProcess]:
    spec = GenerationSpec(name="gen-0", model_path=str(model), engine=EngineSpec(), plane=plane)
    with anyio.fail_after(120):
        async with launch("workers.generation", name="gen-0", spec=spec, env={"OMP_NUM_THREADS": "1"}) as process:
            yield process


def ask(n: int, *messages: Message, parent: ParentCoords | None = None, max_tokens: int = 20) -> CallRequest:
    sampling = Sampling(max_tokens=max_tokens, seed=n)
    return CallRequest(rollout_id="r-1", call_id=f"r-1/{n}", messages=messages, sampling=sampling, parent=parent)


def user(text: str) -> Message:
    return Message(role="user", content=text)


async def test_a_conversation_through_a_worker_process(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", seed=1)
    save_weights(tiny_lm(seed=2), tmp_path / "good")
    save_weights(tiny_lm(seed=2, tie_word_embeddings=False), tmp_path / "bad")

    async with start_servers() as servers, worker(model, servers.spec) as process:
        client, plane = process.client, await connect(servers.spec)
        try:
            assert await client.call(api.INFO, Empty()) == api.WorkerInfo(
                max_model_len=512, vocab_size=103, weight_version=0, engine="torch"
            )
            await converse(client, plane, model, tmp_path)
            await a_caller_that_leaves(client)
        finally:
            await plane.aclose()


async def converse(client: RpcClient, plane: DataPlane, model: Path, files: Path) -> None:
    first = await client.call(api.GENERATE, ask(0, user("hi")))

    loaded = await client.call(api.LOAD_WEIGHTS, api.LoadWeights(address=str(files / "good"), version=4))
    assert loaded.version == 4
    with pytest.raises(RemoteError, match=r"bad_weights.*not in the model lm_head\.weight") as refused:
        await client.call(api.LOAD_WEIGHTS, api.LoadWeights(address=str(files / "bad"), version=5))
    assert refused.value.failure.failure_class == "infra"
    assert (await client.call(api.STATS, Empty())).weight_version == 4

    parent = ParentCoords(
        call_id="r-1/0",
        staging_keys=(first.coords.staging_key,),
        cum_len=first.coords.cum_len,
        chain_hash=first.coords.chain_hash,
        cumulative_hash=first.coords.cumulative_hash,
        messages=2,
    )
    second = await client.call(api.GENERATE, ask(1, user("hi"), first.message, user("more"), parent=parent))
    assert first.coords.weight_spans == (WeightSpan(0, 0, first.completion_tokens),)
    assert second.coords.weight_spans == (WeightSpan(4, 0, second.completion_tokens),)
    with pytest.raises(RemoteError, match="prompt_too_long"):
        await client.call(api.GENERATE, ask(2, user("x" * 600)))

    keys = [first.coords.staging_key, second.coords.staging_key]
    assert await plane.keys(STAGING) == sorted(keys)
    rows = {
        k: SimpleNamespace(**row) for k, row in zip(keys, await plane.get(STAGING, keys, STAGING_COLUMNS), strict=True)
    }
    links = tuple(link_of(reply.coords, reply.finish_reason) for reply in (first, second))
    row = materialize(RowPlan(rollout_id="r-1", links=links), rows)
    assert isinstance(row, VerifiedRow), row

    ids = row.input_ids.tolist()
    for reply, reference in ((first, load(model)), (second, tiny_lm(seed=2))):
        prompt, end = reply.prompt_tokens, reply.coords.cum_len
        expected = reference_logprobs(reference, ids[:prompt], ids[prompt:end], Sampling(max_tokens=1))
        assert max(abs(a - b) for a, b in zip(expected, row.rollout_logprobs[prompt:end], strict=True)) <= 1e-4


async def a_caller_that_leaves(client: RpcClient) -> None:
    async def call(n: int) -> None:
        with anyio.move_on_after(0.2):
            await client.call(api.GENERATE, ask(n, user("hi"), max_tokens=400))

    async with anyio.create_task_group() as group:
        for n in range(100, 140):
            group.start_soon(call, n)
    await client.call(api.ABORT, api.Abort(call_id="r-1/100"))
    while True:
        stats = await client.call(api.STATS, Empty())
        if stats.running == stats.waiting == 0:
            break


NOWHERE = PlaneSpec(controller=ServerAddress("controller", "c", "127.0.0.1", {}), storage=())


def spec_for(model: Path) -> GenerationSpec:
    return GenerationSpec(name="gen-0", model_path=str(model), engine=EngineSpec(), plane=NOWHERE)


async def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="none is no directory"):
        async with service.serve(spec_for(tmp_path / "none"), RpcServer("gen-0")):
            pass


class Handlers:
    """Stands for the RPC server: it keeps the handlers for calling them here."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}

    def register(self, method: Method[Any, Any], handler: Any) -> None:
        self.by_name[method.name] = handler


async def test_a_dead_engine_fails_its_callers_and_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane, handlers = MemoryPlane(), Handlers()

    async def connect_to_memory(_: PlaneSpec) -> MemoryPlane:
        return plane

    async def live() -> None:
        async with service.serve(spec_for(tiny_model(tmp_path)), cast(RpcServer, handlers)):
            with pytest.raises(HandlerError, match="ZeroDivisionError"):
                await handlers.by_name["generate"](ask(0, user("hi")))
            await anyio.sleep_forever()

    monkeypatch.setattr(service, "connect", connect_to_memory)
    monkeypatch.setattr(ModelRunner, "_check_cached_decoding", lambda *_: None)
    monkeypatch.setattr(ModelRunner, "decode", lambda *_: 1 / 0)
    with anyio.fail_after(60), pytest.raises(ExceptionGroup) as failure:
        await live()
    assert failure.group_contains(EngineDead, match="ZeroDivisionError")
    with pytest.raises(DataPlaneDown):
        await plane.keys(STAGING)
