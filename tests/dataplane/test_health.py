"""A death is told apart from an idle connection that was closed, and from a machine that is out of reach for a while."""

from __future__ import annotations

import socket

import anyio
import pytest
from anyio.abc import SocketStream

from dataplane import health
from dataplane.errors import DataPlaneDown

pytestmark = pytest.mark.anyio
HOST = "127.0.0.1"


async def test_a_server_is_dead_when_it_takes_no_more_connections() -> None:
    deaths: list[DataPlaneDown] = []
    connections = 0
    enough = anyio.Event()

    async def close(stream: SocketStream) -> None:
        nonlocal connections
        connections += 1
        if connections == 3:
            enough.set()
        await stream.aclose()

    with anyio.fail_after(20):
        listener = await anyio.create_tcp_listener(local_host=HOST)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(health.watch, "the server", HOST, port, deaths.append)
            async with anyio.create_task_group() as serving:
                serving.start_soon(listener.serve, close)
                await enough.wait()
                assert not deaths
                serving.cancel_scope.cancel()
            await listener.aclose()
    assert [str(death) for death in deaths] == [f"the server is gone: {_refusal(port)}"]
    with pytest.raises(DataPlaneDown, match="the server cannot be reached"):
        await health.require("the server", HOST, port)


async def test_a_machine_that_takes_no_connection_for_long_is_called_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CONNECT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(health, "UNREACHABLE_S", 0.5)
    deaths: list[DataPlaneDown] = []
    with socket.create_server((HOST, 0), backlog=0) as server, anyio.fail_after(20):
        port = server.getsockname()[1]
        waiting = [await anyio.connect_tcp(HOST, port)]  # the queue is full, and the kernel answers nobody
        began = anyio.current_time()
        await health.watch("the server", HOST, port, deaths.append)
        assert anyio.current_time() - began > 0.5
        for stream in waiting:
            await stream.aclose()
    [death] = deaths
    assert "not reachable for 0.5 s" in str(death) or "no connection within 0.1 s" in str(death)


def _refusal(port: int) -> str:
    try:
        socket.create_connection((HOST, port), timeout=1)
    except ConnectionRefusedError as error:
        return f"[Errno {error.errno}] Connect call failed ('{HOST}', {port})"
    raise AssertionError
