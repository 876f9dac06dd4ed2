"""The digests that prove staged tokens, byte-compatible with NeMo-Gym's `*-v2` staging digests.

All are SHA-256 in lowercase hex over a domain string and big-endian fields. `u64` is 8 bytes; `B(x)` is u64(len(x)) and x;
`IDS` is u64(n) and each token id as u64; `F32` is u64(n) and each value as IEEE-754 float32.

Arrays are packed in bulk: the chain hash costs the delta, the cumulative hash one pass over the conversation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from struct import pack
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ledger.records import FinishReason, Routes, WeightSpan

TokenIds = npt.NDArray[np.integer[Any]]
"""1-D, non-negative; of any integer width and byte order."""

SCHEMA_VERSION = 2
DIGEST_VERSION = 2
EXTRAS_DIGEST_VERSION = 1

_EXTRAS_DOMAIN = b"nemo-gym-staging-extras-v1"
_CHAIN_DOMAIN = b"nemo-gym-staging-chain-v1"
_PREFIX_DOMAIN = b"nemo-gym-staging-prefix-v2"
_CALL_DOMAIN = b"nemo-gym-staging-call-v2"


def extras_digest(extras: Mapping[str, object] | None) -> str:
    """Digest of what accompanies a call's tokens: JSON-like values with exact types.

    Allowed are None, bool, int (64 bits), finite float, str, list and dict with string keys; TypeError or ValueError
    otherwise. Key order does not matter.
    """
    out = bytearray(_EXTRAS_DOMAIN)
    out.append(EXTRAS_DIGEST_VERSION)
    _encode(None if extras is None else dict(extras), out)
    return hashlib.sha256(out).hexdigest()


def call_extras(
    spans: Sequence[WeightSpan], finish_reason: FinishReason, routes: Routes | None = None
) -> dict[str, object]:
    """The extras of a call of ours: what its coordinates say beside the tokens."""
    extras: dict[str, object] = {
        "weight_spans": [[s.version, s.start, s.end] for s in spans],
        "finish_reason": finish_reason,
    }
    if routes is not None:
        extras["routed_experts"] = [routes.layers, routes.topk, routes.digest]
    return extras


def routes_digest(routed_experts: npt.NDArray[np.int16]) -> str:
    """Digest of a `routed_experts` column, whatever its shape."""
    return hashlib.sha256(routed_experts.astype("<i2", order="C", copy=False).data).hexdigest()


def chain_hash(parent_hex: str | None, delta_ids: TokenIds) -> str:
    """Hash of a conversation's tokens as its calls added them: the parent's chain hash, then this call's delta."""
    sha = hashlib.sha256(_CHAIN_DOMAIN)
    sha.update(b"\x00" if parent_hex is None else b"\x01" + _digest_bytes(parent_hex))
    sha.update(pack(">Q", delta_ids.size))
    sha.update(_ids(delta_ids))
    return sha.hexdigest()


def cumulative_hash(ids: TokenIds) -> str:
    """Hash of a conversation's tokens as one sequence, however they were divided into calls."""
    sha = hashlib.sha256(_PREFIX_DOMAIN)
    sha.update(pack(">Q", ids.size))
    sha.update(_ids(ids))
    return sha.hexdigest()


def call_digest(
    *,
    rollout_id: str,
    call_id: str,
    parent_call_id: str | None,
    prev_len: int,
    weight_version: int,
    token_ids: TokenIds,
    token_mask: npt.NDArray[np.uint8] | npt.NDArray[np.float32],
    logprobs: npt.NDArray[np.float32],
    extras_digest: str,
    chain_hash: str,
    cumulative_hash: str,
) -> str:
    """Digest of one staged call: its identity, its token delta, and the three digests above.

    The arrays are the delta's, 1-D and of equal length. `weight_version` is the first generated token's. Floats count as
    float32 bit patterns, so -0.0 and 0.0 differ.
    """
    n = token_ids.size
    if token_mask.shape != token_ids.shape or logprobs.shape != token_ids.shape:
        raise ValueError(
            f"call {call_id!r}: token_ids {token_ids.shape}, token_mask {token_mask.shape} and logprobs {logprobs.shape} "
            "must have the same shape"
        )
    sha = hashlib.sha256(_CALL_DOMAIN)
    sha.update(bytes((SCHEMA_VERSION, DIGEST_VERSION, EXTRAS_DIGEST_VERSION)))
    sha.update(_text(rollout_id) + _text(call_id))
    sha.update(b"\x00" if parent_call_id is None else b"\x01" + _text(parent_call_id))
    sha.update(_text("text" if parent_call_id is None else "token_in"))
    sha.update(pack(">4Q", prev_len, n, prev_len + n, weight_version))
    sha.update(pack(">2Q", 8 + 8 * n, n))
    sha.update(_ids(token_ids))
    for values in (token_mask, logprobs):
        sha.update(pack(">2Q", 8 + 4 * n, n))
        sha.update(values.astype(">f4", order="C", copy=False).data)
    sha.update(_digest_bytes(extras_digest))
    sha.update(b"\x01" + _digest_bytes(chain_hash))
    sha.update(b"\x01" + _digest_bytes(cumulative_hash))
    return sha.hexdigest()


def _ids(ids: TokenIds) -> memoryview:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"token ids must be a 1-D integer array, not {ids.ndim}-D {ids.dtype}")
    if ids.dtype.kind == "i" and ids.size and ids.min() < 0:
        raise ValueError(f"token ids must not be negative: {ids.min()}")
    return ids.astype(">u8", order="C", copy=False).data


def _text(text: str) -> bytes:
    encoded = text.encode()
    return pack(">Q", len(encoded)) + encoded


def _digest_bytes(digest: str) -> bytes:
    raw = bytes.fromhex(digest)
    if len(raw) != 32 or digest != raw.hex():
        raise ValueError(f"not a SHA-256 in lowercase hex: {digest!r}")
    return raw


def _encode(value: object, out: bytearray) -> None:
    # Exact types: a subclass (bool of int, a numpy float of float) could encode differently elsewhere.
    kind = type(value)
    if value is None:
        out += b"N"
    elif kind is bool:
        out += b"B\x01" if value else b"B\x00"
    elif kind is int:
        value = cast(int, value)
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"extras: integer out of 64 bits: {value}")
        out += b"I" + pack(">q", value)
    elif kind is float:
        value = cast(float, value)
        if not np.isfinite(value):
            raise ValueError(f"extras: float must be finite: {value}")
        out += b"F" + pack(">d", value)
    elif kind is str:
        out += b"S" + _text(cast(str, value))
    elif kind is list:
        items = cast("list[object]", value)
        out += b"L" + pack(">Q", len(items))
        for item in items:
            _encode(item, out)
    elif kind is dict:
        entries = cast("dict[object, object]", value)
        keys = [key for key in entries if type(key) is str]
        if len(keys) != len(entries):
            raise TypeError("extras: dict keys must be strings")
        out += b"D" + pack(">Q", len(keys))
        for key in sorted(keys, key=str.encode):
            out += _text(key)
            _encode(entries[key], out)
    else:
        raise TypeError(f"extras: {kind.__name__} is not allowed; use None, bool, int, float, str, list or dict")
