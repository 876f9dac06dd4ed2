"""What the finalizer finds of a rollout, as rows of the train partition and as the sample that the buffer holds."""

from __future__ import annotations

from typing import TypeAlias

from msgspec.structs import replace

from controller.echo import EchoedRow
from controller.publish import train_row
from controller.records import PlayedRollout, SampleRow, TrainSample
from dataplane.plane import Column
from ledger.branches import VerifiedRollout
from ledger.reasons import Rejection

Verdict: TypeAlias = VerifiedRollout | EchoedRow | Rejection


def columns_of(rollout_id: str, verdict: Verdict) -> dict[str, dict[str, Column]]:
    """The rows to publish, by key."""
    match verdict:
        case VerifiedRollout():
            return {key: train_row(row) for key, row in zip(_keys(rollout_id, verdict), verdict.rows, strict=True)}
        case EchoedRow():
            return {rollout_id: verdict.columns}
        case Rejection():
            return {}


def sample_of(rollout: PlayedRollout, verdict: Verdict) -> TrainSample:
    """The sample; that of a rejected rollout is a placeholder."""
    sample = TrainSample(rollout_id=rollout.rollout_id, reward=rollout.reward, metrics=rollout.metrics)
    match verdict:
        case VerifiedRollout():
            keys = _keys(rollout.rollout_id, verdict)
            return replace(
                sample,
                rows=tuple(
                    SampleRow(key=key, length=row.length, loss_tokens=row.loss_tokens)
                    for key, row in zip(keys, verdict.rows, strict=True)
                ),
                truncated=verdict.rows[0].finish_reason == "length",
                oldest_version=min(row.oldest_version for row in verdict.rows),
            )
        case EchoedRow():
            row = SampleRow(key=rollout.rollout_id, length=verdict.length, loss_tokens=verdict.loss_tokens)
            return replace(sample, rows=(row,), oldest_version=verdict.oldest_version, proven=False)
        case Rejection():
            return replace(sample, reason=verdict.reason)


def _keys(rollout_id: str, verdict: VerifiedRollout) -> list[str]:
    """The rollout's own id for its first row, the last call's id for the others."""
    return [rollout_id, *(row.leaf for row in verdict.rows[1:])]
