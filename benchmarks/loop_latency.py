"""What the controller's loop feels of the data plane: awaited as here, and called synchronously on the loop.

    python -m benchmarks.loop_latency [--seconds 20] [--frozen 10] [--png loop_latency.png]

A whole run with a real local TransferQueue (its servers are processes of their own) plays 256 rollouts at the same time, of
one to three calls with 1,024 to 2,048 tokens each. Generation workers stage their rows from their own processes; the
controller reads, verifies, publishes and clears; a trainer process reads what a step trains, and the step's rows are cleared
at its end. Engines and trainer have no model. It does so twice: with the plane as it is, and with one that only differs in
how it is called, on the loop, which stands until the answer is there. TransferQueue's own synchronous API is made so: its
client's coroutine runs in a thread, and the caller waits for the result, without a deadline.

Each time, after the healthy part, the storage server is stopped (SIGSTOP) for `--frozen` seconds. Lag is the delay of a task
that is due every millisecond. The PNG shows all of it, beside an idle loop in the same process. The last line is JSON:
`ours_p999_ms`, `ours_max_ms` (healthy), `frozen_max_ms`, `sync_max_ms` (healthy), `sync_frozen_s` (the longest delay with
storage frozen), `idle_max_ms`, and `ratio_max`, `sync_max_ms` by `ours_max_ms`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import tempfile
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio

from benchmarks.fake_process import running
from benchmarks.fake_worker import TOKEN, RunningWorker
from benchmarks.lag import TICK_S, LoopLag
from controller.config.schema import (
    Config,
    DataPlaneConfig,
    EnvironmentConfig,
    GenerationConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
)
from controller.interpreter import quiet_interpreter
from dataplane.plane import Column, DataPlane, Row
from dataplane.servers import Servers, start_servers
from dataplane.spec import PlaneSpec, connect
from ledger.journal import Journal
from tests.fakes.environment import Talker
from tests.fakes.house import open_house
from workers.open_files import allow_many_connections
from workers.rpc.client import RpcClient

T = TypeVar("T")

ROLLOUTS = 256
GROUP_SIZE = 8
WORKERS = 2
CALLS = 3
IDLE_S = 5.0
WARM_UP_STEPS = 3
SETTLE_S = 2.0


@dataclass(frozen=True)
class Lags:
    healthy: LoopLag
    frozen: LoopLag


class SyncPlane:
    """A `DataPlane` whose every call stops the loop that makes it until the plane, on a thread's loop, has answered."""

    def __init__(self, plane: DataPlane, loop: asyncio.AbstractEventLoop) -> None:
        self._plane = plane
        self._loop = loop

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    async def put(self, partition: str, rows: Mapping[str, Row], *, timeout: float | None = None) -> None:
        self._wait(self._plane.put(partition, rows, timeout=timeout))

    async def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str], *, timeout: float | None = None
    ) -> list[dict[str, Column]]:
        return self._wait(self._plane.get(partition, keys, columns, timeout=timeout))

    async def clear(self, partition: str, keys: Collection[str], *, timeout: float | None = None) -> int:
        return self._wait(self._plane.clear(partition, keys, timeout=timeout))

    async def keys(self, partition: str, *, prefix: str = "", timeout: float | None = None) -> list[str]:
        return self._wait(self._plane.keys(partition, prefix=prefix, timeout=timeout))

    def take_metrics(self) -> Mapping[str, float]:
        return self._plane.take_metrics()

    async def aclose(self) -> None:
        await self._plane.aclose()


@contextmanager
def loop_in_thread() -> Generator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@asynccontextmanager
async def opened(spec: PlaneSpec, *, synchronous: bool) -> AsyncGenerator[DataPlane]:
    plane = await connect(spec)
    try:
        if synchronous:
            with loop_in_thread() as loop:
                yield SyncPlane(plane, loop)
        else:
            yield plane
    finally:
        await plane.aclose()


async def lags_of(servers: Servers, folder: Path, seconds: float, frozen_s: float, *, synchronous: bool) -> Lags:
    """Of one run."""
    addresses = {name: f"unix:{folder}/{name}.sock" for name in (*worker_names(), "training")}
    journal, _ = await Journal.open(folder / "ledger")
    with running(addresses, servers.spec):
        clients = {name: RpcClient(address, TOKEN, name=name) for name, address in addresses.items()}
        async with (
            opened(servers.spec, synchronous=synchronous) as plane,
            open_house(
                config(folder, frozen_s),
                Talker(1_000_000, turns=CALLS, think_s=0.05),
                log=journal,
                remember=False,
                generation=[RunningWorker(name, clients[name]) for name in worker_names()],
                trainer=clients["training"],
                plane=plane,
            ) as house,
            freezer(servers, frozen_s) as freeze,
        ):
            lags = Lags(LoopLag(), LoopLag())
            with quiet_interpreter():
                async with anyio.create_task_group() as tg:
                    tg.start_soon(house.run.pump)
                    await house.run.buffer.wait_until(lambda: house.run.state.step >= WARM_UP_STEPS)
                    async with lags.healthy.watched():
                        await anyio.sleep(seconds)
                    async with lags.frozen.watched():
                        await freeze()
                    tg.cancel_scope.cancel()
            await house.run.end_live_groups("measured")
        for client in clients.values():
            await client.aclose()
    await journal.aclose()
    return lags


def worker_names() -> list[str]:
    return [f"generation-{i}" for i in range(WORKERS)]


def config(folder: Path, frozen_s: float) -> Config:
    groups = ROLLOUTS // GROUP_SIZE
    return Config(
        run=RunConfig(dir=str(folder), steps=100_000),
        model=ModelConfig(path="models/none"),
        environment=EnvironmentConfig(name="talker"),
        rollout=RolloutConfig(groups_per_step=groups // 2, group_size=GROUP_SIZE, max_tokens=4096),
        generation=GenerationConfig(workers=WORKERS),
        dataplane=DataPlaneConfig(timeout_s=frozen_s + 20),
    )


@asynccontextmanager
async def freezer(servers: Servers, seconds: float) -> AsyncGenerator[Callable[[], Awaitable[None]]]:
    """A function that stops the storage servers for so long, by a process that no blocked loop can keep from letting them go
    on. It is started here, since a fork of this process keeps the loop."""
    pids = " ".join(str(pid) for name, pid in servers.pids.items() if name.startswith("storage"))
    script = f"read start || exit; kill -STOP {pids}; sleep {seconds}; kill -CONT {pids}"
    async with await anyio.open_process(["sh", "-c", script]) as process:

        async def freeze() -> None:
            assert process.stdin is not None
            await process.stdin.send(b"\n")
            await process.wait()
            await anyio.sleep(SETTLE_S)

        yield freeze


async def measure(seconds: float, frozen_s: float, folder: Path) -> tuple[LoopLag, Lags, Lags]:
    found: list[Lags] = []
    for synchronous in (False, True):
        where = folder / ("sync" if synchronous else "ours")
        where.mkdir()
        async with start_servers(storage_units=1, timeout_s=60, plane_timeout_s=frozen_s + 20) as servers:
            found.append(await lags_of(servers, where, seconds, frozen_s, synchronous=synchronous))
    idle = LoopLag()
    with quiet_interpreter():
        async with idle.watched():
            await anyio.sleep(IDLE_S)
    return idle, found[0], found[1]


def draw(path: Path, traces: Mapping[str, LoopLag]) -> None:
    """Lag over time, one below the other, on the same logarithmic scale."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure: Any
    axes: Any
    figure, axes = plt.subplots(len(traces), 1, figsize=(10, 2 * len(traces)), sharey=True, layout="constrained")
    for axis, (name, lag) in zip(axes, traces.items(), strict=True):
        at_s, elapsed = [], 0.0
        for ms in lag.seen_ms:
            elapsed += TICK_S + ms / 1000
            at_s.append(elapsed)
        axis.plot(at_s, [max(ms, 0.01) for ms in lag.seen_ms], linewidth=0.6)
        axis.axhline(10, color="grey", linewidth=0.6, linestyle="dashed")
        axis.set(yscale="log", ylabel="lag (ms)", title=f"{name}: longest {lag.max_ms:,.1f} ms")
    axes[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each healthy part")
    parser.add_argument("--frozen", type=float, default=10.0, help="for how long storage is stopped")
    parser.add_argument("--png", type=Path, default=Path("loop_latency.png"), help="where the traces are drawn")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    allow_many_connections()
    with tempfile.TemporaryDirectory(prefix="benchmark-loop-") as folder:
        idle, ours, sync = anyio.run(
            measure, arguments.seconds, arguments.frozen, Path(folder), backend_options={"use_uvloop": True}
        )
    traces = {
        "idle": idle,
        "awaited": ours.healthy,
        "awaited, storage frozen": ours.frozen,
        "synchronous": sync.healthy,
        "synchronous, storage frozen": sync.frozen,
    }
    for name, lag in traces.items():
        quantiles = ", ".join(f"p{100 * q:g} {lag.quantile_ms(q):.2f}" for q in (0.5, 0.99, 0.999))
        print(f"{name}: {quantiles}, longest {lag.max_ms:.2f} ms ({len(lag.seen_ms)} ticks)", flush=True)
    draw(arguments.png, traces)
    figures = {
        "ours_p999_ms": ours.healthy.quantile_ms(0.999),
        "ours_max_ms": ours.healthy.max_ms,
        "frozen_max_ms": ours.frozen.max_ms,
        "sync_max_ms": sync.healthy.max_ms,
        "sync_frozen_s": sync.frozen.max_ms / 1000,
        "idle_max_ms": idle.max_ms,
        "ratio_max": sync.healthy.max_ms / ours.healthy.max_ms,
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
