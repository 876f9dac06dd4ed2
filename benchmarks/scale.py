"""How the controller bears many rollouts in flight: loop lag, memory, and its CPU per model call, from 100 to 10,000.

    python -m benchmarks.scale [--seconds 40] [--calls-per-s 300] [--rollouts 100 1000 10000]

A whole run with all of its parts (pumps, gate, ledger with a journal on disk, RPC client, fleet monitor, finalizers, buffer,
train pump) plays so many rollouts at the same time, of one to three calls each, for as long as `--seconds`; the processes
around it are fakes. Generation workers are processes of their own that answer over RPC, with proof, when a call has taken
its time: the more are in flight, the longer it is, so that the same number ends each second. Trainer and data plane cost
next to nothing. A step trains half of the rollouts that are in flight. Each number of rollouts has a process of its own.

The last line is JSON, each figure for each number of rollouts: `p99_lag_ms` of the loop from the first dispatch on (with the
longest, `max_lag_ms`, and that of an idle loop before, `idle_p99_lag_ms`), `rss_mb` at its highest, `cpu_us_per_call`: user
and system time of the controller's process by calls answered, and for how long all that is in flight is ended when the
run is stopped (`ending_s`, `ending_max_lag_ms`).
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio

from benchmarks.constant_tokens import ConstantPlane
from benchmarks.fake_worker import TOKEN, RunningWorker
from benchmarks.lag import LoopLag
from controller.config.schema import (
    Config,
    EnvironmentConfig,
    FinalizerConfig,
    GenerationConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
)
from controller.interpreter import quiet_interpreter
from ledger.journal import Journal
from ledger.records import CallReply
from tests.fakes.environment import Talker
from tests.fakes.house import Speed, open_house
from workers.open_files import allow_many_connections
from workers.rpc.client import RpcClient

WORKERS = 4
GROUP_SIZE = 4
MAX_CALLS = 3
IDLE_S = 3.0
HANG_GUARD_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each measurement")
    parser.add_argument("--calls-per-s", type=float, default=300.0, help="model calls that end each second")
    parser.add_argument("--rollouts", type=int, nargs="+", default=[100, 1000, 10000], help="in flight")
    parser.add_argument("--here", action="store_true", help="measure in this process, the first number only")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measured(arguments.rollouts[0], arguments.seconds, arguments.calls_per_s)), flush=True)
        return
    figures: dict[str, dict[str, float]] = {}
    for rollouts in arguments.rollouts:
        command = [sys.executable, "-m", "benchmarks.scale", "--here", "--rollouts", str(rollouts)]
        options = ["--seconds", str(arguments.seconds), "--calls-per-s", str(arguments.calls_per_s)]
        out = subprocess.run([*command, *options], stdout=subprocess.PIPE, check=True, timeout=HANG_GUARD_S).stdout
        found: dict[str, float] = json.loads(out.splitlines()[-1])
        print(f"{rollouts} rollouts in flight: {found}", flush=True)
        for name, value in found.items():
            figures.setdefault(name, {})[str(rollouts)] = value
    print(json.dumps(figures))


def measured(rollouts: int, seconds: float, calls_per_s: float) -> dict[str, float]:
    allow_many_connections()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="benchmark-scale-") as folder:
        addresses = [f"unix:{folder}/{i}.sock" for i in range(WORKERS)]
        with workers(addresses, rollouts / calls_per_s):
            return anyio.run(measure, rollouts, seconds, addresses, Path(folder), backend_options={"use_uvloop": True})


@contextmanager
def workers(addresses: list[str], seconds: float) -> Generator[None]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fake_worker", address, str(seconds)], stdout=subprocess.PIPE
        )
        for address in addresses
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("a worker did not start")
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class NotingClient(RpcClient):
    """Tells the plane what the workers would have staged there."""

    def __init__(self, address: str, name: str, plane: ConstantPlane) -> None:
        super().__init__(address, TOKEN, name=name)
        self._plane = plane
        self.answered = 0

    async def call(self, method: Any, request: Any, *, timeout: float | None = None) -> Any:
        reply = await super().call(method, request, timeout=timeout)
        if isinstance(reply, CallReply):
            self._plane.staged(reply.coords)
            self.answered += 1
        return reply


async def measure(rollouts: int, seconds: float, addresses: list[str], folder: Path) -> dict[str, float]:
    idle, lag, ending = LoopLag(), LoopLag(), LoopLag()
    plane = ConstantPlane()
    clients = [NotingClient(address, f"generation-{i}", plane) for i, address in enumerate(addresses)]
    journal, _ = await Journal.open(folder / "ledger")
    groups = rollouts // GROUP_SIZE
    config = Config(
        run=RunConfig(dir=str(folder), steps=100_000),
        model=ModelConfig(path="models/none"),
        environment=EnvironmentConfig(name="talker"),
        rollout=RolloutConfig(
            groups_per_step=max(1, groups // 2), group_size=GROUP_SIZE, max_tokens=64, max_staleness=1
        ),
        generation=GenerationConfig(workers=WORKERS),
        finalizer=FinalizerConfig(concurrency=8),
    )
    talker = Talker(10_000_000, turns=MAX_CALLS, think_s=0.0)
    speed = Speed(trained_token=0.0, finish=0.05)
    async with open_house(
        config,
        talker,
        speed=speed,
        log=journal,
        remember=False,
        generation=[RunningWorker(client.name, client) for client in clients],
        plane=plane,
    ) as house:
        in_flight: list[int] = []
        used, answered, ending_s = 0.0, 0, 0.0
        pumping, over = anyio.CancelScope(), anyio.Event()

        async def pump() -> None:
            with pumping:
                await house.run.pump()
            over.set()

        with quiet_interpreter():
            async with idle.watched():
                await anyio.sleep(IDLE_S)
            began = time.process_time()
            async with anyio.create_task_group() as tg:
                tg.start_soon(pump)
                async with lag.watched():
                    for _ in range(round(2 * seconds)):
                        await anyio.sleep(0.5)
                        in_flight.append(house.run.pool.outstanding)
                used = time.process_time() - began
                answered = sum(client.answered for client in clients)
                ended = time.monotonic()
                async with ending.watched():
                    pumping.cancel()
                    await over.wait()
                    await house.run.end_live_groups("the measurement is over")
                ending_s = time.monotonic() - ended
    for client in clients:
        await client.aclose()
    await journal.aclose()
    return {
        "p99_lag_ms": round(lag.quantile_ms(0.99), 2),
        "max_lag_ms": round(lag.max_ms, 2),
        "idle_p99_lag_ms": round(idle.quantile_ms(0.99), 2),
        "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "cpu_us_per_call": round(used / answered * 1e6),
        "ending_s": round(ending_s, 2),
        "ending_max_lag_ms": round(ending.max_ms, 2),
        "calls": answered,
        "steps": house.run.state.step,
        "in_flight": max(in_flight),
    }


if __name__ == "__main__":
    main()
