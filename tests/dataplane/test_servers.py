"""Servers come up together, their death is named, and none of them outlives the block or the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable

import anyio
import anyio.lowlevel
import msgspec
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from dataplane.conformance.cases import row
from dataplane.errors import DataPlaneDown
from dataplane.servers import start_servers
from dataplane.spec import PlaneSpec, connect
from tests.dataplane.faults import alive, gone

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("server", ["controller", "storage unit 1"])
async def test_a_killed_server_is_named_and_every_call_ends(server: str, partition: str) -> None:
    async with start_servers(storage_units=2, timeout_s=120) as servers:
        plane = await connect(servers.spec)
        keys = ["a", "b", "c", "d"]
        await plane.put(partition, {key: row(1) for key in keys})

        async def is_told(call: Awaitable[object]) -> None:
            with pytest.raises(DataPlaneDown, match=r"server .* is gone"):
                await call

        def calls() -> list[Awaitable[object]]:
            return [
                plane.put(partition, {key: row(1) for key in "efgh"}),
                plane.get(partition, keys, ["ids"]),
                plane.clear(partition, keys),  # waits for the get
                plane.keys(partition),
            ]

        with anyio.fail_after(20):  # of calls that have 30 s
            async with anyio.create_task_group() as tasks:
                os.kill(servers.pids[server], signal.SIGSTOP)
                for call in calls():
                    tasks.start_soon(is_told, call)
                await anyio.sleep(0.3)
                os.kill(servers.pids[server], signal.SIGKILL)
            for call in calls():
                await is_told(call)
            with pytest.raises(DataPlaneDown, match=rf"{server} \(pid \d+\) was killed by SIGKILL"):
                await servers.wait()
        dead = servers.spec.controller if server == "controller" else servers.spec.storage[1]
        await cannot_connect(servers.spec, names=dead.id)
        with anyio.fail_after(20):
            await plane.aclose()


async def cannot_connect(spec: PlaneSpec, *, names: str) -> None:
    with anyio.fail_after(30), pytest.raises(DataPlaneDown, match=names):
        await connect(msgspec.structs.replace(spec, timeout_s=20))


async def test_leaving_the_block_stops_frozen_servers_and_passes_its_error_on() -> None:
    servers = start_servers(timeout_s=120)
    returned = anyio.Event()

    async def wait() -> None:
        await servers.wait()
        returned.set()

    async def fail_with_a_frozen_server() -> None:
        async with servers:
            tasks.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            os.kill(servers.pids["controller"], signal.SIGSTOP)
            raise ZeroDivisionError

    async with anyio.create_task_group() as tasks:
        with pytest.raises(ZeroDivisionError):
            await fail_with_a_frozen_server()
    assert returned.is_set()
    assert not any(map(alive, servers.pids.values()))


async def test_a_server_that_fails_to_start_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_NUM_THREADS", "many")
    servers = start_servers(timeout_s=120)
    with pytest.raises(
        DataPlaneDown, match=r"(?s)(controller|storage unit 0) .*ended with exit code 1.*ValueError.*'many'"
    ):
        await servers.__aenter__()
    assert not any(map(alive, servers.pids.values()))


async def test_servers_that_take_too_long_are_stopped() -> None:
    servers = start_servers(timeout_s=0.3)
    with pytest.raises(DataPlaneDown, match=r"controller \(pid \d+\) was not ready within 0.3 s"):
        await servers.__aenter__()
    assert servers.pids
    assert not any(map(alive, servers.pids.values()))


async def test_a_cancelled_start_leaves_no_server() -> None:
    servers = start_servers(timeout_s=120)
    with anyio.move_on_after(0.3):
        await servers.__aenter__()
    assert servers.pids
    assert not any(map(alive, servers.pids.values()))


async def test_servers_end_when_their_parent_is_killed() -> None:
    script = """
import anyio
from dataplane.servers import start_servers

async def main():
    async with start_servers(timeout_s=120) as servers:
        print(*servers.pids.values(), flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""
    async with await anyio.open_process([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=None) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in (await BufferedByteReceiveStream(parent.stdout).receive_until(b"\n", 100)).split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        parent.kill()
        await gone(*pids)
