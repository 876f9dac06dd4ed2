"""Methods, a served socket, and the other ends that misbehave."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import SocketStream, TaskGroup
from msgspec import Struct

from workers.rpc.client import RpcClient
from workers.rpc.errors import RpcError
from workers.rpc.method import Empty, Method
from workers.rpc.server import RpcServer

TOKEN = "the-token"


class Text(Struct, frozen=True, forbid_unknown_fields=True):
    text: str


ECHO = Method("echo", Text, Text, timeout_s=20.0)
HANG = Method("hang", Empty, Empty, timeout_s=20.0)


async def echo(request: Text) -> Text:
    return request


class Hanging:
    """A handler that never answers; it tells when it began and when it was cancelled."""

    def __init__(self) -> None:
        self.begun = anyio.Event()
        self.cancelled = anyio.Event()
        self.runs = 0

    async def __call__(self, request: Empty) -> Empty:
        self.runs += 1
        self.begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.cancelled.set()
        return request


class Gate:
    """A handler that answers once it is opened."""

    def __init__(self) -> None:
        self.begun = anyio.Event()
        self.open = anyio.Event()
        self.runs = 0

    async def __call__(self, request: Text) -> Text:
        self.runs += 1
        self.begun.set()
        await self.open.wait()
        return request


class Attempt:
    """A call in the background, whose outcome is its reply or its `RpcError`."""

    def __init__(self, tasks: TaskGroup, call: Callable[..., Awaitable], *args: object) -> None:
        self._done = anyio.Event()
        self._outcome: object = None
        tasks.start_soon(self._run, call, args)

    async def _run(self, call: Callable[..., Awaitable], args: tuple[object, ...]) -> None:
        try:
            self._outcome = await call(*args)
        except RpcError as error:
            self._outcome = error
        self._done.set()

    async def outcome(self) -> object:
        await self._done.wait()
        return self._outcome


@asynccontextmanager
async def socket_path() -> AsyncGenerator[Path]:
    folder = tempfile.mkdtemp(prefix="rpc-")
    try:
        yield Path(folder) / "s"
    finally:
        shutil.rmtree(folder)


@asynccontextmanager
async def serving(server: RpcServer, address: str, token: str = TOKEN) -> AsyncGenerator[str]:
    """The bound address; on leaving, the server stops."""
    async with anyio.create_task_group() as tasks:
        yield await tasks.start(server.serve, address, token)
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def pair(
    *methods: tuple[Method, Callable[..., Awaitable]], max_bytes: int = 2**20, client_max_bytes: int | None = None
) -> AsyncGenerator[tuple[str, RpcClient]]:
    """The address of a server with the given methods and `echo`, and a client of it. Nothing here takes half a minute."""
    server = RpcServer("w0", max_bytes=max_bytes)
    for method, handler in (*methods, (ECHO, echo)):
        server.register(method, handler)
    with anyio.fail_after(30):
        async with (
            socket_path() as path,
            serving(server, f"unix:{path}") as address,
            RpcClient(address, TOKEN, name="w0", max_bytes=client_max_bytes or max_bytes) as client,
        ):
            yield address, client


@asynccontextmanager
async def other_end(handle: Callable[[SocketStream], Awaitable[None]]) -> AsyncGenerator[str]:
    """A unix socket whose connections are given to `handle`; yields its address."""
    async with socket_path() as path, await anyio.create_unix_listener(path) as listener:

        async def handle_and_close(stream: SocketStream) -> None:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
                async with stream:
                    await handle(stream)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, handle_and_close)
            yield f"unix:{path}"
            tasks.cancel_scope.cancel()


def says(reply: bytes) -> Callable[[SocketStream], Awaitable[None]]:
    """An other end that answers whatever it is asked with the same bytes."""

    async def handle(stream: SocketStream) -> None:
        await stream.receive()
        await stream.send(reply)

    return handle


def answers(status_line: bytes, body: bytes) -> Callable[[SocketStream], Awaitable[None]]:
    """An other end that answers a call of `echo` under the call's own request id."""

    async def handle(stream: SocketStream) -> None:
        request = await stream.receive()
        request_id = next(line for line in request.split(b"\r\n") if line.lower().startswith(b"x-request-id"))
        length = b"Content-Length: %d" % len(body)
        await stream.send(b"\r\n".join((status_line, b"X-Method: echo", request_id, length, b"", body)))

    return handle


def request_bytes(path: str, body: bytes = b"", *, token: str = TOKEN, verb: str = "POST", **headers: str) -> bytes:
    """A raw request; header names are written with underscores."""
    lines = [f"{verb} {path} HTTP/1.1", "Host: w", f"Authorization: Bearer {token}", f"Content-Length: {len(body)}"]
    given = {"X_Request_Id": "id-1", "X_Deadline_Ms": "20000", **headers}
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in given.items() if value]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def exchange(address: str, request: bytes) -> tuple[int, bytes]:
    """Send raw bytes and read one HTTP reply: status and body."""
    async with await anyio.connect_unix(address.removeprefix("unix:")) as stream:
        await stream.send(request)
        return await read_reply(stream)


async def read_reply(stream: SocketStream) -> tuple[int, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive()
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += await stream.receive()
    return int(head.split()[1]), body
