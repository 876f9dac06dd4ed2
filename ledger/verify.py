"""Verification: from a receipt and its staged rows to one training row, every token proven, or to a rejection. Pure.

First a row plan is made from the receipt alone: which staged rows make up the training row, and what each must be. Then the
plan is materialized: each row is checked against its link while the training row is put together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ledger.digests import call_digest, chain_hash, cumulative_hash, routes_digest
from ledger.links import Link, check_link
from ledger.reasons import Reason, Rejection
from ledger.receipts import Receipt
from ledger.records import FinishReason

LOGPROB_TOLERANCE = 1e-5
"""How far above 0 rounding may lift a logprob."""


class StagedRow(Protocol):
    """One call's token delta as staged: 1-D arrays of equal length (see `dataplane.sink.TokenDelta`)."""

    @property
    def token_ids(self) -> npt.NDArray[np.int64]: ...
    @property
    def token_mask(self) -> npt.NDArray[np.uint8]: ...
    @property
    def logprobs(self) -> npt.NDArray[np.float32]: ...
    @property
    def weight_versions(self) -> npt.NDArray[np.int64]: ...
    @property
    def routed_experts(self) -> npt.NDArray[np.int16] | None:
        """`layers * topk` numbers per token, for the calls that have `routes`."""
        ...


_DTYPES = {"token_ids": np.int64, "token_mask": np.uint8, "logprobs": np.float32, "weight_versions": np.int64}


StagedRows = Mapping[str, StagedRow | Rejection]
"""By staging key. A rejection stands for a row that could not be read, and says why."""


class RowPlan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a training row is put together: each link's staged row is the tokens [prev_len, end) of it."""

    rollout_id: str
    links: tuple[Link, ...]

    @property
    def length(self) -> int:
        return self.links[-1].end


@dataclass(frozen=True)
class VerifiedRow:
    """A whole conversation, proven. All arrays are 1-D, one element per token.

    `loss_mask` is 1 on the generated tokens that the row is to train: all, unless another row has some of them (see
    `ledger.branches`). `rollout_logprobs` (natural log) are 0 elsewhere. `weight_versions` of a prompt token is the next
    generated one's.
    """

    leaf: str
    """The last call."""
    finish_reason: FinishReason
    input_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.uint8]
    rollout_logprobs: npt.NDArray[np.float32]
    weight_versions: npt.NDArray[np.int64]
    loss_tokens: int
    """Number of tokens with loss_mask 1."""
    oldest_version: int
    """Oldest weight version among them."""
    routed_experts: npt.NDArray[np.int16] | None = None
    """[length * layers * topk] when the engine gave routes for every call."""
    routes_shape: tuple[int, int] | None = None
    """(layers, topk)."""

    @property
    def length(self) -> int:
        return self.input_ids.size


def verify(receipt: Receipt, rows: StagedRows) -> VerifiedRow | Rejection:
    """Plan and materialize. Only the rows of the chain are looked at."""
    plan = plan_row(receipt)
    return plan if isinstance(plan, Rejection) else materialize(plan, rows)


def plan_row(receipt: Receipt) -> RowPlan | Rejection:
    """The plan of a trainable receipt, after all checks that need no tokens; the receipt's own rejection otherwise."""
    if receipt.rejections:
        return receipt.rejections[0]
    if not receipt.chain or receipt.chain[-1].call_id != receipt.terminal:
        return Rejection(Reason.BROKEN_CHAIN, f"the chain does not end in the terminal call {receipt.terminal!r}")
    return plan_chain(receipt.rollout_id, receipt.chain)


def plan_chain(rollout_id: str, chain: Sequence[Link]) -> RowPlan | Rejection:
    """The plan of a conversation, root first, after all checks that need no tokens."""
    prev_len = 0
    for link in chain:
        rejection = check_link(link, rollout_id=rollout_id, prev_len=prev_len)
        if rejection is not None:
            return rejection
        if link.generated == 0:
            return Rejection(Reason.EMPTY_GENERATION, f"call {link.call_id!r} generated nothing")
        prev_len = link.end
    if len({None if link.routes is None else (link.routes.layers, link.routes.topk) for link in chain}) > 1:
        return Rejection(Reason.WRONG_ROUTES, "the calls of the chain differ in the shape of their routed experts")
    return RowPlan(rollout_id=rollout_id, links=tuple(chain))


def materialize(plan: RowPlan, rows: StagedRows, *, proven: int = 0) -> VerifiedRow | Rejection:
    """The training row, after recomputing every digest of every link; the first failed check otherwise.

    The first `proven` links were verified before, with these rows and in this order. Costs a few passes over the tokens,
    plus one hash of the conversation so far per link.
    """
    fragments: list[StagedRow] = []
    for index, link in enumerate(plan.links):
        row = rows.get(link.staging_key)
        if row is None:
            return Rejection(Reason.MISSING_ROW, f"no staged row {link.staging_key!r}")
        if isinstance(row, Rejection):
            return row
        rejection = None if index < proven else _check_columns(link, row) or _check_routes(link, row)
        if rejection is not None:
            return rejection
        fragments.append(row)
    routes = plan.links[0].routes
    row = VerifiedRow(
        leaf=plan.links[-1].call_id,
        finish_reason=plan.links[-1].finish_reason,
        input_ids=np.concatenate([f.token_ids for f in fragments]),
        loss_mask=np.concatenate([f.token_mask for f in fragments]),
        rollout_logprobs=np.concatenate([f.logprobs for f in fragments]),
        weight_versions=np.concatenate([f.weight_versions for f in fragments]),
        loss_tokens=sum(link.generated for link in plan.links),
        oldest_version=min(span.version for link in plan.links for span in link.weight_spans),
        routed_experts=None
        if routes is None
        else np.concatenate([f.routed_experts for f in fragments if f.routed_experts is not None]),
        routes_shape=None if routes is None else (routes.layers, routes.topk),
    )
    return _check_digests(plan, row, proven) or row


def _check_columns(link: Link, row: StagedRow) -> Rejection | None:
    def rejected(reason: Reason, detail: str) -> Rejection:
        return Rejection(reason, f"row {link.staging_key!r}: {detail}")

    for name, dtype in _DTYPES.items():
        column: npt.NDArray[Any] = getattr(row, name)
        if column.ndim != 1 or column.dtype != dtype:
            return rejected(
                Reason.MALFORMED_ROW, f"{name} is {column.ndim}-D {column.dtype}, not 1-D {np.dtype(dtype)}"
            )
        if column.size != link.delta_len:
            return rejected(Reason.WRONG_LENGTH, f"{name} has {column.size} elements, not {link.delta_len}")
    if row.token_ids.min() < 0:
        return rejected(Reason.MALFORMED_ROW, f"token_ids holds {row.token_ids.min()}")
    carry = link.carry_len
    if row.token_mask[:carry].any() or not (row.token_mask[carry:] == 1).all():
        return rejected(Reason.WRONG_MASK, f"the mask is not {carry} zeros and then {link.generated} ones")
    # Written so that NaN fails: it compares false with everything.
    sampled = row.logprobs[carry:]
    if row.logprobs[:carry].any() or not ((sampled > -np.inf) & (sampled <= LOGPROB_TOLERANCE)).all():
        return rejected(Reason.BAD_LOGPROBS, "a logprob is positive or not finite, or a prompt token has one")
    if not np.array_equal(row.weight_versions, _versions(link)):
        return rejected(Reason.WRONG_VERSIONS, f"weight_versions are not those of {link.weight_spans}")
    return None


def _check_routes(link: Link, row: StagedRow) -> Rejection | None:
    if link.routes is None:
        return None
    column, size = row.routed_experts, link.delta_len * link.routes.layers * link.routes.topk
    if column is None or column.dtype != np.int16 or column.shape != (size,):
        found = "missing" if column is None else f"{column.dtype} {column.shape}"
        return Rejection(
            Reason.WRONG_ROUTES, f"row {link.staging_key!r}: routed_experts is {found}, not int16 ({size},)"
        )
    if routes_digest(column) != link.routes.digest:
        return Rejection(Reason.WRONG_ROUTES, f"row {link.staging_key!r}: routed_experts do not hash to their digest")
    return None


def _versions(link: Link) -> npt.NDArray[np.int64]:
    versions = np.full(link.delta_len, link.weight_spans[0].version, dtype=np.int64)
    for span in link.weight_spans[1:]:
        versions[link.carry_len + span.start : link.carry_len + span.end] = span.version
    return versions


def _check_digests(plan: RowPlan, row: VerifiedRow, proven: int) -> Rejection | None:
    ids = row.input_ids.astype(">u8")  # The digests' own byte order: packed once, not once per hash.
    parent = plan.links[proven - 1] if proven else None
    for link in plan.links[proven:]:
        reason = _wrong_digest(plan.rollout_id, parent, link, ids, row)
        if reason is not None:
            return Rejection(reason, f"row {link.staging_key!r}: {reason.meaning}")
        parent = link
    return None


def _wrong_digest(
    rollout_id: str, parent: Link | None, link: Link, ids: npt.NDArray[np.uint64], row: VerifiedRow
) -> Reason | None:
    span = slice(link.prev_len, link.end)
    if chain_hash(None if parent is None else parent.chain_hash, ids[span]) != link.chain_hash:
        return Reason.WRONG_CHAIN_HASH
    if cumulative_hash(ids[: link.end]) != link.cumulative_hash:
        return Reason.WRONG_CUMULATIVE_HASH
    digest = call_digest(
        rollout_id=rollout_id,
        call_id=link.call_id,
        parent_call_id=None if parent is None else parent.call_id,
        prev_len=link.prev_len,
        weight_version=link.weight_spans[0].version,
        token_ids=ids[span],
        token_mask=row.loss_mask[span],
        logprobs=row.rollout_logprobs[span],
        extras_digest=link.extras_digest,
        chain_hash=link.chain_hash,
        cumulative_hash=link.cumulative_hash,
    )
    return None if digest == link.digest else Reason.WRONG_DIGEST
