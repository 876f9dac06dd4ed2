"""The caller's side of RPC: every call ends, within its deadline, in a reply or in one `RpcError`."""

from __future__ import annotations

import io
import math
import secrets
from types import TracebackType
from typing import NoReturn, Self

import aiohttp
import anyio
import msgspec
from yarl import URL

from workers.rpc import wire
from workers.rpc.errors import Failure, ProtocolError, RemoteError, RpcTimeout, WorkerUnreachable
from workers.rpc.method import Method, Reply, Request
from workers.rpc.wire import Health, Status, TcpAddress, UnixAddress

_BACKOFF_S = (0.05, 0.2)
"""Pauses before a request is sent again after its connection failed."""
_KEEPALIVE_S = 30.0


class RpcClient:
    """Calls one worker. Usable from one event loop; any number of calls may be in flight."""

    def __init__(self, address: str, token: str, *, name: str, max_bytes: int = wire.MAX_BYTES) -> None:
        """`address` is "unix:/path" or "tcp:host:port"; `name` is how errors call the worker.

        Nothing connects before the first call. `max_bytes` bounds a request and a reply.
        """
        self.name = name
        self._address = wire.parse_address(address)
        self._token = token
        self._url = _base_url(self._address)
        self._max_bytes = max_bytes
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._instance: str | None = None

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
        if self._session is not None:
            await self._session.close()

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
        headers = {wire.REQUEST_ID: secrets.token_hex(8)}
        for pause in (*_BACKOFF_S, None):
            instance = headers.get(wire.INSTANCE, self._instance)
            left_ms = (deadline - anyio.current_time()) * 1000
            headers[wire.DEADLINE_MS] = str(math.ceil(min(max(left_ms, 1), wire.MAX_DEADLINE_MS)))
            try:
                return await self._send(verb, path, name, body, headers)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
                received = not isinstance(error, aiohttp.ClientConnectorError)
                if pause is None or self._closed or (received and instance is None):
                    reason = f"{type(error).__name__}: {error}"
                    raise WorkerUnreachable(f"{self.name}: {name}: {reason} (at {self._address})") from error
                if received and instance is not None:
                    headers[wire.INSTANCE] = instance
            except aiohttp.ClientError as error:
                raise self._protocol_error(name, f"not an HTTP reply: {error!r}") from error
            await anyio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def _send(self, verb: str, path: str, name: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        if self._closed:
            raise WorkerUnreachable(f"{self.name}: {name}: this client is closed")
        if self._session is None:
            self._session = self._open()
        # aiohttp writes bytes at once, and warns that more than 1 MiB of them would hold up the loop.
        data = body if len(body) <= 2**20 else io.BytesIO(body)
        response = await self._session.request(
            verb, self._url.with_path(path), data=data, headers=headers, allow_redirects=False
        )
        try:
            if (response.headers.get(wire.REQUEST_ID), response.headers.get(wire.METHOD)) != (
                headers[wire.REQUEST_ID],
                name,
            ):
                raise self._protocol_error(name, f"HTTP {response.status} that does not answer this request")
            self._instance = response.headers.get(wire.INSTANCE)
            return response.status, await self._read(response, name)
        except BaseException:
            response.close()
            raise

    async def _read(self, response: aiohttp.ClientResponse, name: str) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in response.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > self._max_bytes:
                raise self._protocol_error(name, f"the reply has more than {self._max_bytes} bytes")
        return b"".join(parts)

    def _open(self) -> aiohttp.ClientSession:
        """A session without limits of its own: hundreds of calls wait for minutes, each with its own deadline."""
        if isinstance(self._address, UnixAddress):
            connector = aiohttp.UnixConnector(self._address.path, limit=0, keepalive_timeout=_KEEPALIVE_S)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Authorization": wire.bearer(self._token)},
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )

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


def _base_url(address: UnixAddress | TcpAddress) -> URL:
    if isinstance(address, UnixAddress):
        return URL.build(scheme="http", host="worker")
    return URL.build(scheme="http", host=address.host, port=address.port)
