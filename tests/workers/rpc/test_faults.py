"""Connections that break, servers that vanish or lie: the caller gets an `RpcError` in time, and no handler runs twice."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import anyio
import pytest
from anyio.abc import SocketStream

from tests.workers.rpc.kit import (
    ECHO,
    HANG,
    TOKEN,
    Attempt,
    Gate,
    Hanging,
    Text,
    answers,
    echo,
    other_end,
    says,
    serving,
    socket_path,
)
from workers.rpc.client import RpcClient
from workers.rpc.errors import Failure, ProtocolError, RemoteError, RpcError, RpcTimeout, WorkerUnreachable
from workers.rpc.method import Empty, Method
from workers.rpc.server import RpcServer
from workers.rpc.wire import Status, encode

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


GATE = Method("gate", Text, Text, timeout_s=20.0)


class Proxy:
    """Forwards a client's connections to a server, and can cut the client's half while the server's stays."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.clients: list[SocketStream] = []

    async def handle(self, client: SocketStream) -> None:
        self.clients.append(client)
        upstream = await anyio.connect_unix(self.target.removeprefix("unix:"))
        async with upstream, anyio.create_task_group() as tasks:
            tasks.start_soon(self._pump, client, upstream)
            await self._pump(upstream, client)
            tasks.cancel_scope.cancel()

    async def _pump(self, source: SocketStream, sink: SocketStream) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for part in source:
                with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await sink.send(part)

    async def cut(self) -> None:
        """Close the clients' halves; the server still sees its connections open."""
        for client in self.clients:
            await client.aclose()
        self.clients.clear()


@asynccontextmanager
async def proxied(server: RpcServer) -> AsyncGenerator[tuple[Proxy, RpcClient]]:
    with anyio.fail_after(30):
        async with socket_path() as path, serving(server, f"unix:{path}") as target:
            proxy = Proxy(target)
            async with other_end(proxy.handle) as address, RpcClient(address, TOKEN, name="w0") as client:
                yield proxy, client


async def test_a_call_whose_connection_broke_is_repeated_and_runs_once() -> None:
    gate = Gate()
    server = RpcServer("w0")
    server.register(ECHO, echo)
    server.register(GATE, gate)
    async with proxied(server) as (proxy, client):
        await client.call(ECHO, Text("hi"))
        async with anyio.create_task_group() as tasks:
            attempt = Attempt(tasks, client.call, GATE, Text("once"))
            await gate.begun.wait()
            await proxy.cut()
            gate.open.set()
            assert await attempt.outcome() == Text("once")
        assert gate.runs == 1


async def test_a_first_call_whose_connection_broke_is_not_repeated() -> None:
    """Without an earlier reply the client cannot know whether the same server would get the repeat."""
    gate = Gate()
    server = RpcServer("w0")
    server.register(GATE, gate)
    async with proxied(server) as (proxy, client):
        async with anyio.create_task_group() as tasks:
            attempt = Attempt(tasks, client.call, GATE, Text("once"))
            await gate.begun.wait()
            await proxy.cut()
            assert isinstance(await attempt.outcome(), WorkerUnreachable)
        assert gate.runs == 1


async def test_a_call_that_was_cancelled_by_its_broken_connection_is_not_run_again() -> None:
    hanging = Hanging()
    server = RpcServer("w0")
    server.register(ECHO, echo)
    server.register(HANG, hanging)
    with anyio.fail_after(30):
        async with socket_path() as path, serving(server, f"unix:{path}") as target:

            async def cut_after_begin(client: SocketStream) -> None:
                async with await anyio.connect_unix(target.removeprefix("unix:")) as upstream:
                    async for part in client:
                        await upstream.send(part)
                        if b"/rpc/hang" in part and not hanging.begun.is_set():
                            await hanging.begun.wait()
                            return
                        await client.send(await upstream.receive())

            async with other_end(cut_after_begin) as address, RpcClient(address, TOKEN, name="w0") as client:
                await client.call(ECHO, Text("hi"))
                with pytest.raises(RemoteError, match="hang: cancelled"):
                    await client.call(HANG, Empty())
                assert hanging.runs == 1


async def test_a_repeat_is_refused_by_a_server_that_has_restarted() -> None:
    gate = Gate()
    first, second = RpcServer("w0"), RpcServer("w0")
    first.register(ECHO, echo)
    first.register(GATE, gate)
    second.register(ECHO, echo)
    second.register(GATE, gate)
    async with (
        socket_path() as second_path,
        serving(second, f"unix:{second_path}") as second_address,
        proxied(first) as (proxy, client),
    ):
        await client.call(ECHO, Text("hi"))
        async with anyio.create_task_group() as tasks:
            attempt = Attempt(tasks, client.call, GATE, Text("once"))
            await gate.begun.wait()
            proxy.target = second_address
            await proxy.cut()
            outcome = await attempt.outcome()
        assert isinstance(outcome, WorkerUnreachable)
        assert "the server that had the request has stopped" in str(outcome)
        assert gate.runs == 1
        assert await client.call(ECHO, Text("a new call")) == Text("a new call")


async def test_calls_go_on_after_a_restart_on_the_same_address() -> None:
    with anyio.fail_after(30):
        async with socket_path() as path, RpcClient(f"unix:{path}", TOKEN, name="w0") as client:
            for text in ("before", "after"):
                server = RpcServer("w0")
                server.register(ECHO, echo)
                async with serving(server, f"unix:{path}"):
                    assert await client.call(ECHO, Text(text)) == Text(text)
            with pytest.raises(WorkerUnreachable):
                await client.call(ECHO, Text("nobody there"))


async def test_a_server_that_comes_up_late_is_reached_by_a_repeat() -> None:
    server = RpcServer("w0")
    server.register(ECHO, echo)
    with anyio.fail_after(30):
        async with (
            socket_path() as path,
            RpcClient(f"unix:{path}", TOKEN, name="w0") as client,
            anyio.create_task_group() as tasks,
        ):
            attempt = Attempt(tasks, client.call, ECHO, Text("hi"))
            await anyio.wait_all_tasks_blocked()
            async with serving(server, f"unix:{path}"):
                assert await attempt.outcome() == Text("hi")


async def test_no_server_is_unreachable_and_says_where() -> None:
    with anyio.fail_after(30):
        async with RpcClient("unix:/nonexistent/s", TOKEN, name="w0") as client:
            with pytest.raises(WorkerUnreachable, match=r"w0: echo: .*/nonexistent/s"):
                await client.call(ECHO, Text("hi"))
            with pytest.raises(RpcTimeout):
                await client.call(ECHO, Text("hi"), timeout=0.01)


async def test_closing_the_client_ends_its_calls() -> None:
    hanging = Hanging()
    server = RpcServer("w0")
    server.register(HANG, hanging)
    with anyio.fail_after(30):
        async with socket_path() as path, serving(server, f"unix:{path}") as address:
            client = RpcClient(address, TOKEN, name="w0")
            async with anyio.create_task_group() as tasks:
                attempt = Attempt(tasks, client.call, HANG, Empty())
                await hanging.begun.wait()
                await client.aclose()
                assert isinstance(await attempt.outcome(), WorkerUnreachable)
            with pytest.raises(WorkerUnreachable, match="this client is closed"):
                await client.call(HANG, Empty())
            await client.aclose()
            await hanging.cancelled.wait()


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"\x00\xff garbage \r\n\r\n", ProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", ProtocolError),
        (
            b"HTTP/1.1 200 OK\r\nX-Request-Id: other\r\nX-Method: echo\r\nContent-Length: 8\r\n\r\n\x81\xa4text\xa1x",
            ProtocolError,
        ),
        (b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n", ProtocolError),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 4\r\n\r\nnope", ProtocolError),
        (b"HTTP/1.1 200 OK\r\nX-" + b"y" * 100_000 + b"\r\n\r\n", ProtocolError),
        (b"", WorkerUnreachable),
        (b"HTTP/1.1 200", WorkerUnreachable),
    ],
)
async def test_a_reply_that_is_none_is_an_error(reply: bytes, error: type[RpcError]) -> None:
    with anyio.fail_after(30):
        async with other_end(says(reply)) as address, RpcClient(address, TOKEN, name="w0") as client:
            with pytest.raises(error):
                await client.call(ECHO, Text("hi"))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (Status.BAD_MESSAGE, ProtocolError),
        (Status.UNAUTHORIZED, RemoteError),
        (Status.FAILED, RemoteError),
        (Status.GONE, WorkerUnreachable),
        (Status.DEADLINE, RpcTimeout),
        (418, ProtocolError),
    ],
)
async def test_each_status_is_one_error_with_the_workers_words(status: int, error: type[RpcError]) -> None:
    body = encode(Failure(kind="k", message="what happened"))
    with anyio.fail_after(30):
        async with (
            other_end(answers(b"HTTP/1.1 %d X" % status, body)) as address,
            RpcClient(address, TOKEN, name="w0") as client,
        ):
            with pytest.raises(error, match="what happened"):
                await client.call(ECHO, Text("hi"))


async def test_a_reply_that_stops_half_way_ends_at_the_deadline() -> None:
    async def half(stream: SocketStream) -> None:
        await stream.receive()
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Le")
        await anyio.sleep_forever()

    with anyio.fail_after(30):
        async with other_end(half) as address, RpcClient(address, TOKEN, name="w0") as client:
            with pytest.raises(RpcTimeout):
                await client.call(ECHO, Text("hi"), timeout=0.2)


@pytest.mark.parametrize(
    ("framing", "message"),
    [
        (b"Content-Length: 999999999999", "more than 10000 bytes"),
        (b"Transfer-Encoding: chunked", "must have a Content-Length"),
        (b"X-Nothing: 1", "must have a Content-Length"),
        (b"Content-Length: 4\r\nContent-Length: 4", "comes twice"),
    ],
)
async def test_a_reply_without_an_end_below_the_limit_is_refused(framing: bytes, message: str) -> None:
    async def endless(stream: SocketStream) -> None:
        request = await stream.receive()
        request_id = next(line for line in request.split(b"\r\n") if line.lower().startswith(b"x-request-id"))
        await stream.send(b"HTTP/1.1 200 OK\r\nX-Method: echo\r\n" + request_id + b"\r\n" + framing + b"\r\n\r\n")
        while True:
            await stream.send(b"400\r\n" + b"x" * 1024 + b"\r\n")

    with anyio.fail_after(30):
        async with other_end(endless) as address, RpcClient(address, TOKEN, name="w0", max_bytes=10_000) as client:
            with pytest.raises(ProtocolError, match=message):
                await client.call(ECHO, Text("hi"))


async def test_bytes_that_nobody_asked_for_close_the_connection_and_reach_no_call() -> None:
    async def talkative(stream: SocketStream) -> None:
        request = await stream.receive()
        request_id = next(line for line in request.split(b"\r\n") if line.lower().startswith(b"x-request-id"))
        reply = (
            b"HTTP/1.1 200 OK\r\nX-Method: echo\r\n" + request_id + b"\r\nContent-Length: 8\r\n\r\n\x81\xa4text\xa1x"
        )
        await stream.send(reply)
        await anyio.sleep(0.05)
        await stream.send(reply)
        await anyio.sleep_forever()

    with anyio.fail_after(30):
        async with other_end(talkative) as address, RpcClient(address, TOKEN, name="w0") as client:
            for _ in range(2):
                assert await client.call(ECHO, Text("hi")) == Text("x")
                await anyio.sleep(0.1)
