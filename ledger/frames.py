"""Frames: batches of events as bytes. A frame is read back whole and in its place, or it is not read at all.

    header    magic, length u32, number u64, previous u32, crc u32     (little-endian)
    payload   `length` bytes: a msgpack array of events

`number` counts a journal's frames and `previous` is the CRC of the one before, so that a frame that was altered, removed or
moved shows at its place, even if its own CRC was made to fit. The CRC (zlib's CRC-32) covers header and payload.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

import msgspec

from ledger.events import Event, encode

MAGIC = b"\xf5LF1"
FRAME_BYTES = 256 * 1024
"""A frame should take no more events from this size on: decoding it then takes about a millisecond."""
MAX_PAYLOAD = 64 * 1024 * 1024
"""Bytes; a header that claims more is not one."""
_HEADER = Struct("<4sIQI")
_CRC = Struct("<I")
_ARRAY = Struct(">BI")
_ARRAY32 = 0xDD
_HEADER_LEN = _HEADER.size + _CRC.size
_EVENTS_AT = _HEADER_LEN + _ARRAY.size

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[Event]] = msgspec.msgpack.Decoder(list[Event])


class Link(NamedTuple):
    """Where a chain of frames goes on: the number of the next one, and the CRC of the one before."""

    number: int
    crc: int


START = Link(0, 0)


class FrameBuilder:
    """Takes events, and then becomes a frame's bytes."""

    __slots__ = ("_buffer", "count")

    def __init__(self) -> None:
        self._buffer = bytearray(_EVENTS_AT)
        self.count = 0

    def add(self, event: Event) -> None:
        _encoder.encode_into(event, self._buffer, -1)
        self.count += 1

    @property
    def size(self) -> int:
        """Bytes so far."""
        return len(self._buffer)

    def seal(self, link: Link) -> tuple[bytearray, Link]:
        """The frame, as the next one at `link`, and the link that follows. Raises ValueError for one that is too large."""
        frame = self._buffer
        length = len(frame) - _HEADER_LEN
        if length > MAX_PAYLOAD:
            raise ValueError(f"events of {length} bytes do not fit into a frame; at most {MAX_PAYLOAD} do")
        _ARRAY.pack_into(frame, _HEADER_LEN, _ARRAY32, self.count)
        _HEADER.pack_into(frame, 0, MAGIC, length, link.number, link.crc)
        crc = _crc(frame, 0, length)
        _CRC.pack_into(frame, _HEADER.size, crc)
        return frame, Link(link.number + 1, crc)


class Frame(NamedTuple):
    offset: int
    """Of its header, in the bytes that it was read from."""
    events: list[Event]

    def offset_of(self, index: int) -> int:
        """Where its event `index` begins."""
        return self.offset + _EVENTS_AT + sum(len(encode(event)) for event in self.events[:index])


class FrameFault(Exception):
    """What stands at `offset` is not the next frame. `later`: it or one written after it is there all the same."""

    def __init__(self, offset: int, why: str, *, later: bool) -> None:
        super().__init__(why)
        self.offset = offset
        self.later = later


class UnknownEvents(Exception):
    """The frame at `offset` is as it was written, and holds something that is no event known here."""

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(why)
        self.offset = offset


class FrameReader:
    """Iterates over the frames in `data[offset:]`, of which the first must be the next one at `link`.

    Raises FrameFault or UnknownEvents. `offset` and `link` are those after the frames that were read so far.
    """

    def __init__(self, data: bytes, offset: int, link: Link) -> None:
        self._data = data
        self.offset = offset
        self.link = link

    def __iter__(self) -> Iterator[Frame]:
        for offset, payload in self.payloads():
            try:
                events = _decoder.decode(payload)
            except msgspec.DecodeError as e:
                raise UnknownEvents(offset, str(e)) from e
            yield Frame(offset, events)

    def payloads(self) -> Iterator[tuple[int, memoryview]]:
        """The frames' offsets and undecoded payloads."""
        while self.offset < len(self._data):
            found = _read(self._data, self.offset)
            if isinstance(found, str):
                raise self._fault(found)
            if found.link != self.link:
                raise self._fault(self._misplaced(found))
            offset = self.offset
            self.offset += found.size
            self.link = Link(found.link.number + 1, found.crc)
            yield offset, memoryview(self._data)[offset + _HEADER_LEN : self.offset]

    def _misplaced(self, found: _Header) -> str:
        if found.link.number == self.link.number:
            return "the frame before it was altered after it was written"
        return f"frame {found.link.number} stands where frame {self.link.number} belongs"

    def _fault(self, why: str) -> FrameFault:
        return FrameFault(self.offset, why, later=_later(self._data, self.offset, self.link.number))


class _Header(NamedTuple):
    size: int
    """Bytes of the whole frame."""
    link: Link
    crc: int


def _read(data: bytes, offset: int) -> _Header | str:
    """The header of the intact frame at `offset`, or why there is none."""
    if len(data) - offset < _HEADER_LEN:
        return f"{len(data) - offset} bytes are no whole frame"
    magic, length, number, previous = _HEADER.unpack_from(data, offset)
    if magic != MAGIC:
        return "no frame begins here"
    if length > MAX_PAYLOAD:
        return f"a frame of {length} bytes is not possible"
    if len(data) - offset - _HEADER_LEN < length:
        return f"{len(data) - offset} bytes of a frame that has {length + _HEADER_LEN}"
    (crc,) = _CRC.unpack_from(data, offset + _HEADER.size)
    if crc != _crc(data, offset, length):
        return "the frame's CRC is wrong"
    return _Header(_HEADER_LEN + length, Link(number, previous), crc)


def _crc(data: bytes | bytearray, offset: int, length: int) -> int:
    """Of the frame at `offset`, without the field that holds it."""
    view = memoryview(data)
    header = zlib.crc32(view[offset : offset + _HEADER.size])
    return zlib.crc32(view[offset + _HEADER_LEN : offset + _HEADER_LEN + length], header)


def _later(data: bytes, offset: int, number: int) -> bool:
    """Whether an intact frame with this number or a later one stands somewhere from `offset` on."""
    at = data.find(MAGIC, offset)
    while at >= 0:
        found = _read(data, at)
        if not isinstance(found, str) and found.link.number >= number:
            return True
        at = data.find(MAGIC, at + 1)
    return False
