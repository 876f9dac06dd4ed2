"""Agents that break off at random, against a real engine behind real RPC: nothing stays running, answers are proven."""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from controller.generation_pool import GenerationPool
from controller.member import Member
from dataplane.memory import MemoryPlane
from dataplane.schema import STAGING, STAGING_COLUMNS
from dataplane.sink import TokenDelta
from ledger.events import CallAdmitted, CallCommitted, CallFailed, MemoryLog
from ledger.gate import Gate
from ledger.http.connections import listen
from ledger.http.sampling import SamplingRules
from ledger.http.server import GateServer, Limits
from ledger.ids import call_of
from ledger.ledger import Ledger
from ledger.records import Sampling
from ledger.verify import Rejection, verify
from tests.models import tiny_model
from tests.workers.generation.helpers import running_engine
from workers.generation.api import GENERATE
from workers.generation.capture import Capture
from workers.generation.rendering import ChatRenderer
from workers.generation.torch_engine import TorchEngine
from workers.rpc.client import RpcClient
from workers.rpc.server import RpcServer

pytestmark = pytest.mark.anyio

AGENTS = 8


@dataclass
class Rig:
    engine: TorchEngine
    plane: MemoryPlane
    ledger: Ledger
    log: MemoryLog
    server: GateServer
    rpc: RpcClient

    def client(self, rollout_id: str) -> openai.AsyncOpenAI:
        url, key = self.server.base_url(rollout_id), self.server.api_key(rollout_id)
        return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)


@asynccontextmanager
async def rigged(model: Path) -> AsyncIterator[Rig]:
    renderer, plane, log = ChatRenderer.load(model), MemoryPlane(), MemoryLog()
    rollouts = [f"g0.{i}" for i in range(AGENTS)]
    async with running_engine(model, stop=renderer.stop_token_ids, decode=renderer.plain.decode) as engine:
        rpc = RpcServer("engine")
        rpc.register(GENERATE, Capture(engine, renderer, plane).answer)
        ledger = Ledger(log)
        await ledger.dispatched("g0", "p", rollouts, 0)
        for rollout_id in rollouts:
            await ledger.open(rollout_id, "g0")
        with tempfile.TemporaryDirectory(prefix="rpc-") as folder:
            async with anyio.create_task_group() as tasks:
                address = await tasks.start(rpc.serve, f"unix:{folder}/s", "token")
                async with RpcClient(address, "token", name="engine") as client:
                    pool = GenerationPool([Member.serving(client)], call_timeout_s=30, on_call=lambda *_: None)
                    gate = Gate(ledger, pool.generate, max_calls_per_rollout=1000, call_timeout_s=30)
                    listener = listen("127.0.0.1", 0)
                    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                    rules = SamplingRules(Sampling(max_tokens=40), "fixed")
                    server = GateServer(gate, ledger, rules, url=url, model="tiny", limits=Limits(keep_alive_s=0.01))
                    await tasks.start(server.serve, listener)
                    yield Rig(engine, plane, ledger, log, server, client)
                    tasks.cancel_scope.cancel()


async def test_agents_that_break_off_leave_the_engine_idle_and_every_call_settled(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rng = random.Random(5)
    answered: dict[str, str] = {}
    """Rollout id -> the last answer that reached its agent; another may have been given that it did not wait for."""
    async with rigged(tiny_model(tmp_path_factory.mktemp("engine") / "tiny")) as rig:

        async def play(rollout_id: str) -> None:
            async with rig.client(rollout_id) as client:
                messages: list[Any] = [{"role": "user", "content": rollout_id}]
                for turn in range(6):
                    with anyio.move_on_after(30 if turn == 5 else rng.random() * 0.12):
                        stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
                        chunks = [c async for c in stream]
                        answered[rollout_id] = chunks[-1].id
                        answer = {
                            "role": "assistant",
                            "content": "".join(c.choices[0].delta.content or "" for c in chunks),
                        }
                        messages += [answer, {"role": "user", "content": f"turn {turn}"}]

        async with anyio.create_task_group() as tasks:
            for i in range(AGENTS):
                tasks.start_soon(play, f"g0.{i}")
        while rig.server.in_flight or (await rig.rpc.health()).in_flight:
            await anyio.sleep(0.01)
        stats = rig.engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        admitted = {e.call_id for e in rig.log.events if isinstance(e, CallAdmitted)}
        committed = {e.coords.call_id for e in rig.log.events if isinstance(e, CallCommitted)}
        failed = {e.call_id for e in rig.log.events if isinstance(e, CallFailed)}
        assert committed
        assert failed
        assert admitted == committed | failed
        assert {e.reason for e in rig.log.events if isinstance(e, CallFailed)} == {"cancelled"}
        for i in range(AGENTS):
            await rig.ledger.declare_terminal(f"g0.{i}", call_of(answered[f"g0.{i}"]))
            receipt = await rig.ledger.seal(f"g0.{i}")
            assert not receipt.rejections, receipt
            keys = [link.staging_key for link in receipt.chain]
            rows = zip(keys, await rig.plane.get(STAGING, keys, STAGING_COLUMNS), strict=True)
            assert not isinstance(verify(receipt, {key: TokenDelta(**row) for key, row in rows}), Rejection)
