"""A worker without a model on a real data plane, in a process of its own: `python -m benchmarks.fake_process ROLE ADDRESS`.

`generation` renders, stages and proves as one does, with a fake engine; `training` reads the rows that it is given. The data
plane's spec comes as JSON on stdin.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import anyio
import msgspec
import uvloop

from benchmarks.fake_worker import TOKEN
from dataplane.plane import DataPlane
from dataplane.spec import PlaneSpec, connect
from tests.fakes.engine import FakeEngine, generation_handlers
from tests.fakes.process import FakeProcess, Handlers, Life
from tests.fakes.trainer import FakeTrainer, Trained
from workers.generation import api as generation
from workers.open_files import allow_many_connections
from workers.rpc.method import Method
from workers.rpc.server import RpcServer
from workers.training import api as training

TOKENS = (1024, 2048)
"""Of a completion."""
TOKEN_S = 0.002

METHODS: dict[str, tuple[Method[Any, Any], ...]] = {
    "generation": (generation.GENERATE, generation.LOAD_WEIGHTS, generation.INFO, generation.STATS),
    "training": (
        training.INFO,
        training.BEGIN_STEP,
        training.TRAIN_MICROBATCH,
        training.FINISH_STEP,
        training.PUBLISH_WEIGHTS,
    ),
}


async def serve(role: str, address: str, spec: PlaneSpec) -> None:
    allow_many_connections()
    plane = await connect(spec)
    async with anyio.create_task_group() as tasks:
        process = FakeProcess(role, tasks, lambda life: handlers(role, life, plane))
        process.come_up()
        assert process.life is not None
        server = RpcServer(role)
        for method in METHODS[role]:
            server.register(method, process.life.handlers[method.name])
        print(await tasks.start(server.serve, address, TOKEN), flush=True)
        await anyio.sleep_forever()


def handlers(role: str, life: Life, plane: DataPlane) -> Handlers:
    if role == "training":
        return FakeTrainer(life, plane, trained=Trained(), step_s=lambda tokens: tokens * 5e-6).handlers()
    return generation_handlers(FakeEngine(life, token_s=TOKEN_S, length=length), plane)


def length(rng: random.Random, limit: int) -> int:
    return rng.randint(*TOKENS)


@contextmanager
def running(addresses: dict[str, str], spec: PlaneSpec) -> Generator[None]:
    """A process at each address, of the role that its name begins with."""
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fake_process", name.partition("-")[0], address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for name, address in addresses.items()
    }
    try:
        for name, process in processes.items():
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(spec) + b"\n")
            process.stdin.flush()
            if not process.stdout.readline():
                raise RuntimeError(f"{name} did not start")
        yield
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], sys.argv[2], msgspec.json.decode(sys.stdin.buffer.readline(), type=PlaneSpec)))
