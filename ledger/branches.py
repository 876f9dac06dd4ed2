"""All rows of a rollout: one per proven conversation, and every generated token to be trained in exactly one of them.

Conversations that branched share their first calls. The first row that contains a call trains its tokens, the terminal
conversation's before all others; in the other rows they are context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ledger.links import Link
from ledger.reasons import Reason, Rejection
from ledger.receipts import Receipt
from ledger.verify import StagedRows, VerifiedRow, materialize, plan_chain


@dataclass(frozen=True)
class VerifiedRollout:
    rows: tuple[VerifiedRow, ...]
    """That of the terminal conversation first, if there is one."""
    left_out: tuple[Rejection, ...] = ()
    """Why other conversations have no row."""


def verify_rollout(receipt: Receipt, rows: StagedRows) -> VerifiedRollout | Rejection:
    """The rows of a trainable receipt; a receipt's own rejection otherwise.

    The conversation of the terminal call must be proven; another that is not is left out. Where no terminal call is singled
    out any may be the scored one, so all must be proven.
    """
    if receipt.rejections:
        return receipt.rejections[0]
    end = receipt.chain[-1].call_id if receipt.chain else None
    if end != receipt.terminal or not receipt.conversations:
        return Rejection(Reason.BROKEN_CHAIN, f"the chain does not end in the terminal call {receipt.terminal!r}")
    proven: list[tuple[Sequence[Link], VerifiedRow]] = []
    left_out: list[Rejection] = []
    for chain in receipt.conversations:
        row = _verified(receipt.rollout_id, chain, rows, [links for links, _ in proven])
        if isinstance(row, Rejection):
            if chain is receipt.chain or not receipt.chain:
                return row
            left_out.append(row)
        else:
            proven.append((chain, row))
    return VerifiedRollout(rows=_shared_out(proven), left_out=tuple(left_out))


def _verified(
    rollout_id: str, chain: Sequence[Link], rows: StagedRows, proven: Sequence[Sequence[Link]]
) -> VerifiedRow | Rejection:
    if not chain:
        return Rejection(Reason.BROKEN_CHAIN, "a conversation without a call")
    plan = plan_chain(rollout_id, chain)
    if isinstance(plan, Rejection):
        return plan
    return materialize(plan, rows, proven=max((_common(chain, other) for other in proven), default=0))


def _common(a: Sequence[Link], b: Sequence[Link]) -> int:
    """How many links two chains have in common at their beginning."""
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return i
    return min(len(a), len(b))


def _shared_out(proven: Sequence[tuple[Sequence[Link], VerifiedRow]]) -> tuple[VerifiedRow, ...]:
    taken: set[str] = set()
    out: list[VerifiedRow] = []
    for chain, row in proven:
        own = [link for link in chain if link.cumulative_hash not in taken]
        taken.update(link.cumulative_hash for link in own)
        if len(own) == len(chain):
            out.append(row)
        elif own:
            out.append(_trains(row, own))
    return tuple(out)


def _trains(row: VerifiedRow, own: Sequence[Link]) -> VerifiedRow:
    """The row, with the tokens of `own` as its only loss tokens."""
    mask, logprobs = row.loss_mask.copy(), row.rollout_logprobs.copy()
    mask[:] = 0
    for link in own:
        mask[link.end - link.generated : link.end] = 1
    logprobs[mask == 0] = 0
    return replace(
        row,
        loss_mask=mask,
        rollout_logprobs=logprobs,
        loss_tokens=sum(link.generated for link in own),
        oldest_version=min(span.version for link in own for span in link.weight_spans),
    )
