"""What trainer and engine say to each other when vLLM's own weight transfer runs between their GPUs; no tensor among it.

    engine: Hello                    once per connection
    engine: Ask                      trainer: Offered | Failed
    engine: Begin (it is paused)     trainer: Command ... engine: Done ... trainer: Sent | Failed

Frames are a 4-byte big-endian length and msgpack. Everything that arrives is decoded into these types, within a size limit.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

MAX_FRAME_BYTES = 64 << 20
_HEADER = struct.Struct(">I")


class Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    """Base of all."""


class Hello(Message, frozen=True, tag=True):
    key: str
    """Of the trainer's address."""
    gpus: int
    """Of the engine: each takes part."""


class Ask(Message, frozen=True, tag=True):
    version: int


class Offered(Message, frozen=True, tag=True):
    """The tensors that will come, in order."""

    names: list[str]
    dtypes: list[str]
    """As in torch, e.g. bfloat16."""
    shapes: list[list[int]]


class Begin(Message, frozen=True, tag=True):
    pass


class Command(Message, frozen=True, tag=True):
    """To be carried out in all of the engine's workers."""

    step: Literal["init", "start", "update", "finish"]
    info: dict[str, Any] = field(default_factory=dict[str, Any])


class Done(Message, frozen=True, tag=True):
    error: str = ""
    """Why a command failed; empty when it did not."""


class Sent(Message, frozen=True, tag=True):
    pass


class Failed(Message, frozen=True, tag=True):
    why: str


AnyMessage = Hello | Ask | Offered | Begin | Command | Done | Sent | Failed
_DECODER = msgspec.msgpack.Decoder(AnyMessage)


class Broken(Exception):
    """The other side is gone, or does not keep to the dialogue."""


def encode(message: AnyMessage) -> bytes:
    """The frame."""
    body = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(body)) + body


def length(header: bytes) -> int:
    """Of the body that follows. Raises Broken."""
    (size,) = _HEADER.unpack(header)
    if size > MAX_FRAME_BYTES:
        raise Broken(f"a message of {size} bytes; at most {MAX_FRAME_BYTES} are read")
    return size


def decode(body: bytes) -> AnyMessage:
    """Raises Broken."""
    try:
        return _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise Broken(f"a message that is none: {error}") from error


class Line:
    """The trainer's end of a connection, blocking. Each method raises Broken, or TimeoutError after the socket's timeout."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: AnyMessage) -> None:
        try:
            self._connection.sendall(encode(message))
        except TimeoutError:
            raise
        except OSError as error:
            raise Broken(str(error)) from error

    def receive(self) -> AnyMessage:
        return decode(self._exactly(length(self._exactly(_HEADER.size))))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._connection.recv(size - len(data))
            except TimeoutError:
                raise
            except OSError as error:
                raise Broken(str(error)) from error
            if not part:
                raise Broken("the connection was closed")
            data += part
        return bytes(data)
