"""One call in a receipt's chain, and the checks on it that need no tokens."""

from __future__ import annotations

import re

from msgspec import Struct

from ledger import ids
from ledger.digests import call_extras, extras_digest
from ledger.reasons import Reason, Rejection
from ledger.records import CallCoords, FinishReason, Routes, WeightSpan

_SHA256 = re.compile(r"[0-9a-f]{64}")
_INT64 = 1 << 63


class Link(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A committed call: its staged row is the conversation's tokens [prev_len, prev_len + delta_len)."""

    call_id: str
    staging_key: str
    digest: str
    extras_digest: str
    chain_hash: str
    cumulative_hash: str
    prev_len: int
    carry_len: int
    delta_len: int
    weight_spans: tuple[WeightSpan, ...]
    finish_reason: FinishReason
    routes: Routes | None = None

    @property
    def end(self) -> int:
        return self.prev_len + self.delta_len

    @property
    def generated(self) -> int:
        return self.delta_len - self.carry_len


def link_of(coords: CallCoords, finish_reason: FinishReason) -> Link:
    return Link(
        call_id=coords.call_id,
        staging_key=coords.staging_key,
        digest=coords.digest,
        extras_digest=coords.extras_digest,
        chain_hash=coords.chain_hash,
        cumulative_hash=coords.cumulative_hash,
        prev_len=coords.prev_len,
        carry_len=coords.carry_len,
        delta_len=coords.delta_len,
        weight_spans=coords.weight_spans,
        finish_reason=finish_reason,
        routes=coords.routes,
    )


def check_link(link: Link, *, rollout_id: str, prev_len: int) -> Rejection | None:
    """None if the link may be a call of this rollout that continues `prev_len` tokens and agrees with itself."""

    def rejected(reason: Reason, detail: str) -> Rejection:
        return Rejection(reason, f"call {link.call_id!r}: {detail}")

    if ids.rollout_of(link.call_id) != rollout_id:
        return rejected(Reason.FOREIGN_CALL, f"not of rollout {rollout_id!r}")
    if link.prev_len != prev_len:
        return rejected(Reason.BROKEN_CHAIN, f"prev_len is {link.prev_len}, its parent ends at {prev_len}")
    if not 0 <= link.carry_len <= link.delta_len or link.delta_len == 0:
        return rejected(
            Reason.WRONG_LENGTH, f"carry_len {link.carry_len} and delta_len {link.delta_len} are impossible"
        )
    for value, reason in (
        (link.digest, Reason.WRONG_DIGEST),
        (link.chain_hash, Reason.WRONG_CHAIN_HASH),
        (link.cumulative_hash, Reason.WRONG_CUMULATIVE_HASH),
    ):
        if _SHA256.fullmatch(value) is None:
            return rejected(reason, f"{value!r} is no SHA-256 in lowercase hex")
    if not _cover(link.weight_spans, link.generated):
        return rejected(Reason.WRONG_VERSIONS, f"{link.weight_spans} do not cover {link.generated} tokens")
    if link.routes is not None and not _possible(link.routes):
        return rejected(Reason.WRONG_ROUTES, f"{link.routes} is impossible")
    if link.extras_digest != extras_digest(call_extras(link.weight_spans, link.finish_reason, link.routes)):
        return rejected(
            Reason.WRONG_EXTRAS_DIGEST, "weight spans, finish reason and routes do not hash to extras_digest"
        )
    if link.staging_key != ids.staging_key(link.call_id, link.digest):
        return rejected(
            Reason.WRONG_STAGING_KEY, f"staging key {link.staging_key!r} is not derived from call and digest"
        )
    return None


def _possible(routes: Routes) -> bool:
    return min(routes.layers, routes.topk) > 0 and _SHA256.fullmatch(routes.digest) is not None


def _cover(spans: tuple[WeightSpan, ...], tokens: int) -> bool:
    end = 0
    for span in spans:
        if span.start != end or span.end <= span.start or not 0 <= span.version < _INT64:
            return False
        end = span.end
    return end == tokens
