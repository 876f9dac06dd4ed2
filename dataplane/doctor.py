"""`python -m dataplane doctor`: is this data plane well, how fast is it, and what is wrong, in plain words.

It looks at an address, or starts servers of its own, and puts, reads and clears rows in a partition of its own.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import anyio
import msgspec
import numpy as np

from dataplane import health, software, tq_settings
from dataplane.errors import DataPlaneDown, DataPlaneError
from dataplane.plane import DataPlane
from dataplane.servers import start_servers
from dataplane.spec import PlaneSpec, connect
from dataplane.topology import MooncakeSettings

ROUNDS = 5
ROWS, TOKENS = 16, 2048
CONNECT_TIMEOUT_S = 30.0
"""Long enough for TransferQueue's own greetings to tell which server is silent."""
PACKAGES = ("monoloop", "torch", software.TRANSFER_QUEUE, "pyzmq", "ray", software.MOONCAKE)

Say = Callable[[str, str], None]


async def examine(spec: PlaneSpec, say: Say, *, timeout_s: float) -> list[str]:
    """Look at a running plane; `say(what, text)` gets what is seen. Returns what is wrong: nothing when it is well."""
    master = "" if spec.mooncake is None else f", 1 master, {spec.mooncake.protocol}"
    say("backend", f"{spec.backend}: 1 controller{master}, {len(spec.storage)} storage")
    _say_deadlines(spec, say, timeout_s)
    problems: list[str] = []
    for server in spec.servers:
        began = time.perf_counter()
        try:
            await health.require(str(server), server.ip, server.life_port)
        except DataPlaneDown as error:
            problems.append(f"{error}: it was stopped or killed, or the address is of another machine or an older run")
            say(server.role, f"{server.id} at {server.ip}: dead")
        else:
            took = 1e3 * (time.perf_counter() - began)
            say(server.role, f"{server.id} at {server.ip}: takes connections, {took:.1f} ms; {server.software}")
    if problems:
        return problems
    try:
        began = time.perf_counter()
        plane = await connect(msgspec.structs.replace(spec, timeout_s=CONNECT_TIMEOUT_S))
        say("connected", f"in {time.perf_counter() - began:.1f} s, of which most are imports")
    except DataPlaneError as error:
        return [f"cannot connect: {error}"]
    try:
        await _round_trips(plane, say, timeout_s)
    except DataPlaneError as error:
        problems.append(f"{type(error).__name__}: {error}")
    finally:
        with anyio.CancelScope(shield=True):
            await plane.aclose()
    return problems


async def examine_own(backend: Literal["simple", "mooncake"], say: Say, *, timeout_s: float) -> list[str]:
    """Start servers on this machine, look at them, and stop them."""
    mooncake = MooncakeSettings(memory_mb=64) if backend == "mooncake" else None
    if mooncake is not None and (problem := software.mooncake_problem()):
        return [problem]
    began = time.perf_counter()
    try:
        async with start_servers(plane_timeout_s=timeout_s, mooncake=mooncake) as servers:
            say("started", f"servers of its own, in {time.perf_counter() - began:.1f} s")
            return await examine(servers.spec, say, timeout_s=timeout_s)
    except DataPlaneDown as error:
        return [str(error)]


def say_software(say: Say) -> None:
    """The versions that are installed here. Reads packages' metadata: not for an event loop."""
    versions = [f"{package} {software.version(package)}" for package in PACKAGES]
    say("software", ", ".join([f"Python {platform.python_version()}", *versions]))


async def _round_trips(plane: DataPlane, say: Say, timeout_s: float) -> None:
    partition = f"doctor {uuid.uuid4().hex[:12]}"
    row: dict[str, Any] = {
        "ids": np.arange(TOKENS, dtype=np.int64),
        "logprobs": np.linspace(-1, 0, TOKENS, dtype=np.float32),
    }
    rows = {f"row {n}": row for n in range(ROWS)}
    keys = list(rows)
    took: dict[str, list[float]] = {"put": [], "get": [], "clear": []}

    async def timed(name: str, call: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        value = await call
        took[name].append(1e3 * (time.perf_counter() - began))
        return value

    for _ in range(ROUNDS):
        await timed("put", plane.put(partition, rows, timeout=timeout_s))
        found = await timed("get", plane.get(partition, keys, list(row), timeout=timeout_s))
        if any(one[name].tobytes() != row[name].tobytes() for one in found for name in row):
            raise DataPlaneError("rows came back with other values than they were put with")
        cleared = await timed("clear", plane.clear(partition, keys, timeout=timeout_s))
        if cleared != ROWS or await plane.keys(partition, timeout=timeout_s):
            raise DataPlaneError(f"of {ROWS} rows {cleared} were cleared, and some are still there")
    size = ROWS * sum(column.nbytes for column in row.values()) / 1e6
    say("round trips", f"{ROUNDS} of {ROWS} rows x {TOKENS:,} tokens, {size:.1f} MB; nothing left behind")
    for name, values in took.items():
        say(f"  {name}", f"median {statistics.median(values):.1f} ms, slowest {max(values):.1f} ms")


def _say_deadlines(spec: PlaneSpec, say: Say, timeout_s: float) -> None:
    say("deadlines", f"{spec.timeout_s:g} s for each call of a run's plane; {timeout_s:g} s for the calls made here")
    tq_settings.apply()
    for name, value in tq_settings.DEFAULTS.items():
        if "TIMEOUT" in name or "ATTEMPTS" in name:
            now = os.environ[name]
            say("", f"{name} = {now}" + ("" if now == value else f", from the environment (else {value})"))
