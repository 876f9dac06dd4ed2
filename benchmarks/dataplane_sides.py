"""The sides of `benchmarks.dataplane`, each measured in a process of its own: the plane, and TransferQueue by itself."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import anyio
import msgspec
import numpy as np

from benchmarks.lag import LoopLag
from dataplane.errors import DataPlaneTimeout
from dataplane.plane import DataPlane
from dataplane.spec import PlaneSpec, ServerAddress, connect

COLUMNS = {"input_ids": np.int64, "loss_mask": np.uint8, "rollout_logprobs": np.float32, "weight_versions": np.int64}
CELLS = [(rows, tokens) for tokens in (2_048, 32_768) for rows in (1, 16, 256)]
CELL_BYTES = 2**30
"""Put in a cell, within these bounds of repetitions."""
REPEATS = (3, 30)
LONG_CLEAR_ROWS = 4096
LONG_CLEAR_ROUNDS = 5
FROZEN_S = 1.0
DEADLINE_S = 0.3

Batch = dict[str, dict[str, Any]]


class Task(msgspec.Struct):
    spec: PlaneSpec
    pids: dict[str, int]


class Side(Protocol):
    def prepare(self, rows: Batch) -> Any:
        """The rows as this side wants them. Not measured."""
        ...

    async def put(self, partition: str, keys: Sequence[str], prepared: Any) -> None: ...
    async def get(self, partition: str, keys: Sequence[str]) -> object: ...
    async def clear(self, partition: str, keys: Sequence[str]) -> object: ...
    async def within(self, seconds: float, call: Coroutine[Any, Any, object]) -> None:
        """A call with a deadline, as this side is given one."""
        ...


class Adapter:
    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._timeout: float | None = None

    def prepare(self, rows: Batch) -> Any:
        return rows

    async def put(self, partition: str, keys: Sequence[str], prepared: Any) -> None:
        await self._plane.put(partition, prepared, timeout=self._timeout)

    async def get(self, partition: str, keys: Sequence[str]) -> object:
        return await self._plane.get(partition, keys, list(COLUMNS), timeout=self._timeout)

    async def clear(self, partition: str, keys: Sequence[str]) -> object:
        return await self._plane.clear(partition, keys, timeout=self._timeout)

    async def within(self, seconds: float, call: Coroutine[Any, Any, object]) -> None:
        self._timeout = seconds
        try:
            await call
        except DataPlaneTimeout:
            return
        finally:
            self._timeout = None


class Native:
    """`transfer_queue.async_kv_*`, on the loop."""

    def __init__(self, tq: Any) -> None:
        self._tq = tq

    def prepare(self, rows: Batch) -> Any:
        import torch
        from tensordict import TensorDict

        columns: dict[str, Any] = {
            name: torch.nested.as_nested_tensor(
                [torch.from_numpy(row[name]) for row in rows.values()], layout=torch.jagged
            )
            for name in COLUMNS
        }
        return TensorDict(columns, batch_size=len(rows))

    async def put(self, partition: str, keys: Sequence[str], prepared: Any) -> None:
        await self._tq.async_kv_batch_put(keys=keys, partition_id=partition, fields=prepared)

    async def get(self, partition: str, keys: Sequence[str]) -> object:
        return await self._tq.async_kv_batch_get(keys=keys, partition_id=partition, select_fields=list(COLUMNS))

    async def clear(self, partition: str, keys: Sequence[str]) -> object:
        return await self._tq.async_kv_clear(keys=keys, partition_id=partition)

    async def within(self, seconds: float, call: Coroutine[Any, Any, object]) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(call, seconds)


class Sync(Native):
    """`transfer_queue.kv_*`, called on the loop: the deadline can only be looked at afterwards."""

    async def put(self, partition: str, keys: Sequence[str], prepared: Any) -> None:
        self._tq.kv_batch_put(keys=keys, partition_id=partition, fields=prepared)

    async def get(self, partition: str, keys: Sequence[str]) -> object:
        return self._tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=list(COLUMNS))

    async def clear(self, partition: str, keys: Sequence[str]) -> object:
        return self._tq.kv_clear(keys=keys, partition_id=partition)


async def open_side(name: str, spec: PlaneSpec) -> Side:
    if name == "adapter":
        return Adapter(await connect(spec))
    from dataplane import tq_settings

    tq_settings.apply()
    import transfer_queue
    from omegaconf import OmegaConf
    from transfer_queue.utils.enum_utils import Role
    from transfer_queue.utils.zmq_utils import ZMQServerInfo

    def info(address: ServerAddress) -> Any:
        role = Role.CONTROLLER if address.role == "controller" else Role.STORAGE
        return ZMQServerInfo(role=role, id=address.id, ip=address.ip, ports=dict(address.ports))

    units = {unit.id: info(unit) for unit in spec.storage}
    tq: Any = transfer_queue
    tq.interface._maybe_create_tq_client(
        OmegaConf.create(
            {
                "controller": {"zmq_info": info(spec.controller)},
                "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"zmq_info": units}},
            },
            flags={"allow_objects": True},
        )
    )
    return Native(tq) if name == "native" else Sync(tq)


def batch(rows: int, tokens: int, number: int) -> Batch:
    rng = np.random.default_rng(abs(number))
    columns = {name: rng.integers(0, 100, tokens).astype(dtype) for name, dtype in COLUMNS.items()}
    return {f"{number}/{n}": columns for n in range(rows)}


class Measured:
    """The latencies of one kind of call and the loop's delays meanwhile."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.lag = LoopLag()

    async def call(self, call: Awaitable[object]) -> None:
        async with self.lag.watched():
            began = time.perf_counter()
            await call
            self.seconds.append(time.perf_counter() - began)

    def figures(self, size: int = 0) -> dict[str, float]:
        p50 = statistics.median(self.seconds)
        found = {
            "p50_ms": 1000 * p50,
            "max_ms": 1000 * max(self.seconds),
            "max_lag_ms": self.lag.max_ms,
            "p999_lag_ms": self.lag.quantile_ms(0.999),
        }
        if size:
            found["mb_per_s"] = size / p50 / 1e6
        return {name: round(value, 3) for name, value in found.items()}


async def cell(side: Side, rows: int, tokens: int) -> dict[str, Any]:
    """Rows of so many tokens are put, read and cleared, again and again."""
    size = rows * tokens * sum(np.dtype(dtype).itemsize for dtype in COLUMNS.values())
    repeats = min(max(CELL_BYTES // size, REPEATS[0]), REPEATS[1])
    put, get, clear = Measured(), Measured(), Measured()
    partition = f"{rows} x {tokens}"
    for number in range(-2, repeats):
        if number == 0:  # It is warm.
            put, get, clear = Measured(), Measured(), Measured()
        rows_now = batch(rows, tokens, number)
        keys, prepared = list(rows_now), side.prepare(rows_now)
        await put.call(side.put(partition, keys, prepared))
        await get.call(side.get(partition, keys))
        await clear.call(side.clear(partition, keys))
    return {"put": put.figures(size), "get": get.figures(size), "clear": clear.figures()}


async def long_clear(side: Side) -> dict[str, float]:
    """The end of a step: rows that came in many puts are cleared by one call."""
    clear = Measured()
    for number in range(-1, LONG_CLEAR_ROUNDS):
        if number == 0:
            clear = Measured()
        keys: list[str] = []
        for chunk in range(LONG_CLEAR_ROWS // 256):
            rows = batch(256, 16, 1000 * number + chunk)
            keys += rows
            await side.put("step", list(rows), side.prepare(rows))
        await clear.call(side.clear("step", keys))
    return clear.figures()


async def frozen(side: Side, pids: dict[str, int]) -> dict[str, Any]:
    """Each kind of call, with a deadline, while a server stands still for longer than that."""
    found: dict[str, Any] = {}
    for server, pid in pids.items():
        calls = {"put": Measured(), "get": Measured(), "clear": Measured()}
        old, new = batch(16, 2048, 1), batch(16, 2048, 2)
        partition = f"{server} frozen under {type(side).__name__}"
        await side.put(partition, list(old), side.prepare(old))
        prepared = side.prepare(new)
        for name, call in {
            "get": side.get(partition, list(old)),
            "put": side.put(partition, list(new), prepared),
            "clear": side.clear(partition, list(old)),
        }.items():
            with standing_still(pid):
                await calls[name].call(side.within(DEADLINE_S, call))
        found[server] = {name: measured.figures() for name, measured in calls.items()}
    return found


@contextmanager
def standing_still(pid: int) -> Generator[None]:
    """From another thread it goes on after `FROZEN_S`, whatever this one is stuck in."""
    os.kill(pid, signal.SIGSTOP)
    thaw = threading.Timer(FROZEN_S, os.kill, (pid, signal.SIGCONT))
    thaw.start()
    try:
        yield
    finally:
        thaw.join()


async def measure(name: str, task: Task) -> dict[str, Any]:
    idle = LoopLag()
    side = await open_side(name, task.spec)
    # As the controller does.
    sys.setswitchinterval(0.001)
    gc.collect()
    gc.freeze()
    async with idle.watched():
        await anyio.sleep(2)
    cells: dict[str, Any] = {}
    for rows, tokens in CELLS:
        cells[f"{rows} x {tokens // 1024}k"] = await cell(side, rows, tokens)
    return {
        "idle": {"max_lag_ms": round(idle.max_ms, 3), "p999_lag_ms": round(idle.quantile_ms(0.999), 3)},
        "healthy": cells,
        "clear_4096": await long_clear(side),
        "frozen": await frozen(side, task.pids),
    }


def main() -> None:
    task = msgspec.json.decode(sys.stdin.readline(), type=Task)
    found = anyio.run(measure, sys.argv[1], task, backend_options={"use_uvloop": True})
    print(json.dumps(found), flush=True)
    os._exit(0)  # TransferQueue's own end waits for threads.


if __name__ == "__main__":
    main()
