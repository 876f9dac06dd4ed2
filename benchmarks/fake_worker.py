"""A generation worker without a model, for benchmarks: `python -m benchmarks.fake_worker ADDRESS SECONDS`.

It answers as one does, over RPC and with proof; each call takes between half and one and a half times `SECONDS`. Its answers
are those of `benchmarks.constant_tokens`.
"""

from __future__ import annotations

import random
import sys

import anyio
import uvloop

from benchmarks.constant_tokens import answer
from ledger.records import CallReply, CallRequest
from workers.generation import api
from workers.generation.engine import EngineStats
from workers.open_files import allow_many_connections
from workers.rpc.client import RpcClient
from workers.rpc.method import Empty
from workers.rpc.server import RpcServer

TOKEN = "benchmark"


class Worker:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._running = 0
        self._answered = 0
        self._version = 0

    async def generate(self, request: CallRequest) -> CallReply:
        self._running += 1
        try:
            await anyio.sleep(self._seconds * random.uniform(0.5, 1.5))
        finally:
            self._running -= 1
        self._answered += 1
        return answer(request, self._version)

    async def stats(self, _: Empty) -> EngineStats:
        return EngineStats(
            running=self._running,
            waiting=0,
            kv_usage=0.5,
            generated_tokens=self._answered,
            weight_version=self._version,
        )

    async def load_weights(self, request: api.LoadWeights) -> api.WeightsLoaded:
        self._version = request.version
        return api.WeightsLoaded(version=request.version, seconds=0.0)


async def serve(address: str, seconds: float) -> None:
    allow_many_connections()
    worker, server = Worker(seconds), RpcServer("worker")
    server.register(api.GENERATE, worker.generate)
    server.register(api.STATS, worker.stats)
    server.register(api.LOAD_WEIGHTS, worker.load_weights)
    async with anyio.create_task_group() as tasks:
        print(await tasks.start(server.serve, address, TOKEN), flush=True)
        await anyio.sleep_forever()


class RunningWorker:
    """What the fleet sees of a process that is not its own: it neither dies nor can be restarted."""

    def __init__(self, name: str, client: RpcClient) -> None:
        self.name = name
        self.client = client
        self.alive = True
        self.pid = 0

    async def start(self) -> None:
        raise NotImplementedError

    async def end(self) -> None:
        raise NotImplementedError

    async def died(self) -> str:
        await anyio.sleep_forever()
        return ""


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], float(sys.argv[2])))
