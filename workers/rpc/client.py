"""The caller's side of RPC: every call ends, within its deadline, in a reply or in one `RpcError`."""

from __future__ import annotations

import itertools
import math
import secrets
from collections import deque
from types import TracebackType
from typing import NoReturn, Self

import anyio
import anyio.lowlevel
import msgspec

from workers.rpc import wire
from workers.rpc.errors import Failure, ProtocolError, RemoteError, RpcTimeout, WorkerUnreachable
from workers.rpc.http import HttpConnection, HttpReply, NotHttp, connect
from workers.rpc.method import Method, Reply, Request
from workers.rpc.wire import Health, Status

_BACKOFF_S = (0.05, 0.2)
"""Pauses before a request is sent again after its connection failed."""
_KEEPALIVE_S = 30.0
"""How long a connection may have been idle to be used again; less than the server keeps it."""


class _NotConnected(OSError):
    """Nothing was sent."""


class RpcClient:
    """Calls one worker. Usable from one event loop; any number of calls may be in flight."""

    def __init__(self, address: str, token: str, *, name: str, max_bytes: int = wire.MAX_BYTES) -> None:
        """`address` is "unix:/path" or "tcp:host:port"; `name` is how errors call the worker.

        Nothing connects before the first call. `max_bytes` bounds a request and a reply.
        """
        self.name = name
        self._address = wire.parse_address(address)
        if "\n" in token or "\r" in token:
            raise ValueError("a token holds no line breaks")
        self._headers = f"Host: worker\r\nAuthorization: {wire.bearer(token)}\r\n"
        self._max_bytes = max_bytes
        self._connections: set[HttpConnection] = set()
        self._idle: deque[tuple[HttpConnection, float]] = deque()
        """With the time of the last use; the last used last."""
        self._closed = False
        self._instance: str | None = None
        self._client_id = secrets.token_hex(8)
        self._requests = itertools.count()

    async def call(self, method: Method[Request, Reply], request: Request, *, timeout: float | None = None) -> Reply:
        """Run `method` on the worker. `timeout` in seconds; None takes the method's own.

        The handler runs at most once, however often the request is sent. Raises `RemoteError` (the handler failed),
        `RpcTimeout`, `WorkerUnreachable` or `ProtocolError`. Cancelling the caller, like the deadline, cancels the
        handler.
        """
        seconds = method.timeout_s if timeout is None else timeout
        try:
            body = wire.encode(request)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._protocol_error(method.name, f"the request cannot be encoded: {error}") from error
        if len(body) > self._max_bytes:
            raise self._protocol_error(
                method.name, f"the request has {len(body)} bytes; at most {self._max_bytes} are allowed"
            )
        reply = await self._exchange("POST", f"/rpc/{method.name}", method.name, body, seconds)
        try:
            return wire.decode(method.reply, reply)
        except ValueError as error:
            raise self._protocol_error(method.name, f"the reply is not a {method.reply.__name__}: {error}") from error

    async def health(self, *, timeout: float = 5.0) -> Health:
        """What the worker's process says of itself. Raises like `call`."""
        reply = await self._exchange("GET", "/health", "health", b"", timeout)
        try:
            return msgspec.json.decode(reply, type=Health)
        except msgspec.MsgspecError as error:
            raise self._protocol_error("health", f"the reply is not a Health: {error}") from error

    async def aclose(self) -> None:
        """Close all connections; calls in flight end with `WorkerUnreachable`. Idempotent."""
        self._closed = True
        connections = tuple(self._connections)
        for connection in connections:
            connection.close()
        for connection in connections:
            await connection.closed.wait()
        await anyio.lowlevel.checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _exchange(self, verb: str, path: str, name: str, body: bytes, seconds: float) -> bytes:
        """The body of an OK reply; any other outcome raises."""
        with anyio.move_on_after(seconds):
            status, reply = await self._send_until_answered(verb, path, name, body, anyio.current_time() + seconds)
            return reply if status == Status.OK else self._raise(status, name, reply)
        raise RpcTimeout(f"{self.name}: no reply to {name} within {seconds:g} s")

    async def _send_until_answered(
        self, verb: str, path: str, name: str, body: bytes, deadline: float
    ) -> tuple[int, bytes]:
        request_id = f"{self._client_id}-{next(self._requests)}"
        repeated = ""
        """The server instance that may have the first attempt, as a header."""
        for pause in (*_BACKOFF_S, None):
            instance = self._instance
            left_ms = (deadline - anyio.current_time()) * 1000
            head = (
                f"{verb} {path} HTTP/1.1\r\n{self._headers}{wire.REQUEST_ID}: {request_id}\r\n{repeated}"
                f"{wire.DEADLINE_MS}: {math.ceil(min(max(left_ms, 1), wire.MAX_DEADLINE_MS))}\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            try:
                return self._checked(await self._send(head.encode() + body, name), request_id, name)
            except OSError as error:
                sent = not isinstance(error, _NotConnected)
                if pause is None or self._closed or (sent and not repeated and instance is None):
                    cause = error.__cause__ or error
                    reason = f"{type(cause).__name__}: {cause}"
                    raise WorkerUnreachable(f"{self.name}: {name}: {reason} (at {self._address})") from error
                if sent and not repeated:
                    repeated = f"{wire.INSTANCE}: {instance}\r\n"
            except NotHttp as error:
                raise self._protocol_error(name, str(error)) from error
            await anyio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def _send(self, request: bytes, name: str) -> HttpReply:
        """One exchange, on a connection that is idle or new."""
        if self._closed:
            raise WorkerUnreachable(f"{self.name}: {name}: this client is closed")
        connection = self._take_idle()
        if connection is None:
            try:
                connection = await connect(
                    self._address, max_bytes=self._max_bytes, on_closed=self._connections.discard
                )
            except OSError as error:
                raise _NotConnected(error.errno, error.strerror or str(error)) from error
            self._connections.add(connection)
            if self._closed:
                connection.close()
        reply = await connection.exchange(request)
        if connection.open:
            self._idle.append((connection, anyio.current_time()))
        return reply

    def _take_idle(self) -> HttpConnection | None:
        while self._idle:
            connection, used = self._idle.pop()
            if connection.open and anyio.current_time() - used < _KEEPALIVE_S:
                return connection
            connection.close()
        return None

    def _checked(self, reply: HttpReply, request_id: str, name: str) -> tuple[int, bytes]:
        headers = reply.headers
        if (headers.get(wire.REQUEST_ID.lower()), headers.get(wire.METHOD.lower())) != (request_id, name):
            raise self._protocol_error(name, f"HTTP {reply.status} that does not answer this request")
        self._instance = headers.get(wire.INSTANCE.lower())
        return reply.status, reply.body

    def _raise(self, status: int, name: str, reply: bytes) -> NoReturn:
        try:
            failure = wire.decode(Failure, reply)
        except ValueError as error:
            raise self._protocol_error(name, f"HTTP {status} without a Failure: {error}") from error
        match status:
            case Status.UNAUTHORIZED | Status.FAILED:
                raise RemoteError(failure)
            case Status.GONE:
                raise WorkerUnreachable(f"{self.name}: {name}: {failure.message}")
            case Status.DEADLINE:
                raise RpcTimeout(f"{self.name}: {name}: {failure.message}")
            case _:
                raise self._protocol_error(name, failure.message)

    def _protocol_error(self, name: str, message: str) -> ProtocolError:
        return ProtocolError(f"{self.name}: {name}: {message}")
