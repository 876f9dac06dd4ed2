"""Routed experts as an engine sends them: which experts of each layer each token went through, in NeMo's text envelope.

`nrlre1:<int8|int16|int32>:<T>x<L>x<K>:<base64>`: T tokens, L layers, K experts per token, little-endian; -1 is a route that
the engine does not know. Here they become int16, which holds every number of experts there is.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_HEADER = re.compile(r"nrlre1:(int8|int16|int32):([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9}):")
_MAX = np.iinfo(np.int16).max


class BadRoutes(ValueError):
    """The envelope is not what it should be; the text says where."""


@dataclass(frozen=True)
class RoutedExperts:
    """`experts` int16 [T, L * K]."""

    experts: npt.NDArray[np.int16]
    layers: int
    topk: int


def decode_routes(envelope: str, tokens: int) -> RoutedExperts:
    """Raises BadRoutes unless the envelope is well formed and has a route for each of `tokens` tokens."""
    header = _HEADER.match(envelope)
    if header is None:
        raise BadRoutes(f"routed experts begin with {envelope[:40]!r}, not nrlre1:<int8|int16|int32>:<T>x<L>x<K>:")
    dtype = np.dtype(header[1]).newbyteorder("<")
    rows, layers, topk = (int(header[i]) for i in (2, 3, 4))
    if rows != tokens or layers * topk == 0:
        raise BadRoutes(f"routed experts are {rows} x {layers} x {topk}, for {tokens} tokens")
    data, size = envelope[header.end() :], rows * layers * topk * dtype.itemsize
    if len(data) != 4 * ((size + 2) // 3):
        raise BadRoutes(f"routed experts have {len(data)} characters of base64, for {size} bytes")
    try:
        raw = binascii.a2b_base64(data, strict_mode=True)
    except (ValueError, binascii.Error) as error:
        raise BadRoutes(f"routed experts are not base64: {error}") from error
    if len(raw) != size:
        raise BadRoutes(f"routed experts have {len(raw)} bytes, not {size}")
    experts = np.frombuffer(raw, dtype).reshape(rows, layers * topk)
    if experts.min() < -1 or experts.max() > _MAX:
        raise BadRoutes(f"routed experts go from {experts.min()} to {experts.max()}; -1 to {_MAX} are possible")
    return RoutedExperts(experts.astype(np.int16), layers, topk)


def encode_routes(routed: RoutedExperts) -> str:
    """The envelope, for engines whose routes are arrays."""
    shape = f"{len(routed.experts)}x{routed.layers}x{routed.topk}"
    data = binascii.b2a_base64(routed.experts.astype("<i2").tobytes(), newline=False).decode()
    return f"nrlre1:int16:{shape}:{data}"
