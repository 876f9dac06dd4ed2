"""HTTP/1.1 as far as the RPC client needs it: one exchange at a time on a kept connection, with replies of a known length.

A general HTTP client costs several times what the rest of a call does. What this one does not know is refused, not guessed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import anyio

from workers.rpc.wire import TcpAddress, UnixAddress

_MAX_HEAD_BYTES = 16 * 1024
_STATUS_LINE = re.compile(rb"HTTP/1\.1 ([2-5][0-9]{2})(?: [^\r\n]*)?")
_LENGTH = re.compile(r"[0-9]{1,18}")


class NotHttp(Exception):
    """The bytes that came are no reply, or one of another form or size than is accepted."""


@dataclass(frozen=True)
class HttpReply:
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class HttpConnection(asyncio.Protocol):
    """Use `connect`. `on_closed` hears of its end, whoever ends it."""

    def __init__(self, max_bytes: int, on_closed: Callable[[HttpConnection], None]) -> None:
        self._max_bytes = max_bytes
        self._on_closed = on_closed
        self.closed = anyio.Event()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[HttpReply] | None = None
        self._received = bytearray()
        self._head: tuple[int, dict[str, str], int, int] | None = None
        """Status, headers, where the body starts, and where it ends."""

    @property
    def open(self) -> bool:
        return self._transport is not None

    async def exchange(self, request: bytes) -> HttpReply:
        """Send a request and wait for its reply. Raises NotHttp, or ConnectionError when the connection breaks before it.

        After an error or a cancellation the connection is closed.
        """
        if self._transport is None or self._waiter is not None:
            raise ConnectionResetError("the connection is closed or in use")
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._waiter
        except BaseException:
            self.close()
            raise
        finally:
            self._waiter = None

    def close(self) -> None:
        """At once; an exchange that is running ends with ConnectionError."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    # Of asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(
            exc if isinstance(exc, ConnectionError) else ConnectionResetError("the server closed the connection")
        )
        self.closed.set()
        self._on_closed(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            reply = self._reply()
        except NotHttp as error:
            self._fail(error)
            self.close()
            return
        if reply is not None:
            assert self._waiter is not None
            if reply.headers.get("connection", "").lower() == "close":
                self.close()
            if not self._waiter.done():
                self._waiter.set_result(reply)

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def _reply(self) -> HttpReply | None:
        """The reply, when it is complete."""
        if self._waiter is None or self._waiter.done():
            raise NotHttp("the server sent something that nobody asked for")
        if self._head is None:
            end = self._received.find(b"\r\n\r\n")
            if max(end, len(self._received) if end < 0 else 0) > _MAX_HEAD_BYTES:
                raise NotHttp(f"the reply's headers have more than {_MAX_HEAD_BYTES} bytes")
            if end < 0:
                return None
            status, headers = _parse_head(bytes(self._received[:end]))
            length = _body_length(headers)
            if length > self._max_bytes:
                raise NotHttp(f"the reply has more than {self._max_bytes} bytes")
            self._head = status, headers, end + 4, end + 4 + length
        status, headers, start, end = self._head
        if len(self._received) < end:
            return None
        if len(self._received) > end:
            raise NotHttp("the server sent more than its reply")
        reply = HttpReply(status, headers, bytes(memoryview(self._received)[start:]))
        self._received = bytearray()
        self._head = None
        return reply


async def connect(
    address: UnixAddress | TcpAddress, *, max_bytes: int, on_closed: Callable[[HttpConnection], None]
) -> HttpConnection:
    """Raises OSError. `max_bytes` bounds a reply's body."""
    loop = asyncio.get_running_loop()

    def make() -> HttpConnection:
        return HttpConnection(max_bytes, on_closed)

    if isinstance(address, UnixAddress):
        _, connection = await loop.create_unix_connection(make, address.path)
    else:
        _, connection = await loop.create_connection(make, address.host, address.port)
    return connection


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    line, *lines = head.split(b"\r\n")
    status = _STATUS_LINE.fullmatch(line)
    if status is None:
        raise NotHttp(f"a reply cannot begin with {line[:100]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or name in headers:
            raise NotHttp(f"{line[:100]!r} is no header, or comes twice")
        headers[name] = value.strip()
    return int(status[1]), headers


def _body_length(headers: Mapping[str, str]) -> int:
    length = headers.get("content-length", "")
    if "transfer-encoding" in headers or _LENGTH.fullmatch(length) is None:
        raise NotHttp("a reply must have a Content-Length")
    return int(length)
