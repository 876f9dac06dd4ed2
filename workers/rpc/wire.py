"""The RPC wire format, over HTTP/1.1 on a unix or TCP socket.

A call is `POST /rpc/<method>` with a msgpack body and four headers: bearer token, request id, deadline (milliseconds from
now), and, on a repeat, the server instance that may have the first attempt. A reply has a `Status`, echoes request id and
method, names its server instance, and carries the method's reply type (OK) or a `Failure` (anything else). `GET /health`
takes the same token and answers in JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

Message = TypeVar("Message", bound=Struct)

MAX_BYTES = 4 * 1024 * 1024
"""Default limit of a message. Coding runs on the loop: msgspec holds the GIL, so a thread would block it just the same.
Text costs 1 ms per MiB; number arrays (5 ms per MiB) belong in the data plane."""

_MAX_TEXT = 4000

REQUEST_ID = "X-Request-Id"
METHOD = "X-Method"
DEADLINE_MS = "X-Deadline-Ms"
INSTANCE = "X-Instance"
MAX_DEADLINE_MS = 999_999_999


class Status(IntEnum):
    """How a call ended. Each is one outcome for the caller."""

    OK = 200
    BAD_MESSAGE = 400
    """A request or reply the server cannot accept or send -> ProtocolError."""
    UNAUTHORIZED = 401
    """-> RemoteError."""
    FAILED = 500
    """The handler raised -> RemoteError."""
    GONE = 503
    """The server is stopping, or is not the one that has the first attempt -> WorkerUnreachable."""
    DEADLINE = 504
    """-> RpcTimeout."""


class Health(Struct, frozen=True, kw_only=True):
    """What a worker process says of itself."""

    name: str
    pid: int
    uptime_s: float
    in_flight: int
    """Handlers running now."""


@dataclass(frozen=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True)
class TcpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:{self.host}:{self.port}"


def parse_address(address: str) -> UnixAddress | TcpAddress:
    """Read "unix:/path" or "tcp:host:port" (IPv6 hosts without brackets). Raises ValueError."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest.startswith("/"):
        return UnixAddress(rest)
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isdecimal() and int(port) < 65536:
        return TcpAddress(host, int(port))
    raise ValueError(f"address {address!r} is neither unix:/absolute/path nor tcp:host:port")


def bearer(token: str) -> str:
    return f"Bearer {token}"


encode = msgspec.msgpack.Encoder().encode


def sendable(text: str) -> str:
    """`text` as it can be encoded (lone surrogates, as in undecodable file names, escaped) and not too long to read."""
    return text[:_MAX_TEXT].encode(errors="backslashreplace").decode()


def decode(message: type[Message], data: bytes) -> Message:
    """Decode untrusted bytes. Raises ValueError, which names the path of the field at fault."""
    try:
        return _decoder(message).decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error


@cache
def _decoder(message: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(message)
