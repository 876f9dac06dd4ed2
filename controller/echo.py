"""Token echo: rows from tokens that an environment returns itself (`token_capture.enabled: false`).

Shapes and ranges are checked, so that a mistake costs one rollout and not the run. That the policy sampled these tokens with
these logprobs is the environment's word: nothing proves it.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.plane import Column
from ledger.reasons import Reason, Rejection
from ledger.verify import LOGPROB_TOLERANCE
from workers.environments.base import Tokens


@dataclass(frozen=True)
class Limits:
    """What the engines could have produced."""

    vocab_size: int
    max_tokens: int
    """Longest conversation."""
    version: int
    """The newest weight version."""


@dataclass(frozen=True)
class EchoedRow:
    """Columns as of a verified row, and what the controller keeps of them."""

    columns: dict[str, Column]
    loss_tokens: int
    oldest_version: int

    @property
    def length(self) -> int:
        return self.columns["input_ids"].size


def echoed_row(tokens: Tokens | None, limits: Limits) -> EchoedRow | Rejection:
    """The row that the tokens make, or what is impossible about them."""
    if tokens is None:
        return Rejection(Reason.NO_TOKENS, "set RolloutResult.tokens, or token_capture.enabled: true")

    def bad(detail: str) -> Rejection:
        return Rejection(Reason.BAD_TOKENS, detail)

    ids, mask, versions = (_whole(v) for v in (tokens.input_ids, tokens.loss_mask, tokens.weight_versions))
    logprobs = _numbers(tokens.logprobs)
    if ids is None or mask is None or versions is None or logprobs is None:
        return bad("input_ids, loss_mask and weight_versions must be flat lists of integers, logprobs one of numbers")
    sizes = {"input_ids": ids.size, "loss_mask": mask.size, "logprobs": logprobs.size, "weight_versions": versions.size}
    if len(set(sizes.values())) > 1:
        return bad(f"the lists differ in length: {sizes}")
    if not 2 <= ids.size <= limits.max_tokens:
        return bad(f"{ids.size} tokens; a row has 2 to {limits.max_tokens}")
    if ids.min() < 0 or ids.max() >= limits.vocab_size:
        return bad(f"token ids go from {ids.min()} to {ids.max()}; the model has 0 to {limits.vocab_size - 1}")
    trained = mask == 1
    if not (trained | (mask == 0)).all() or trained[0] or not trained.any():
        return bad("loss_mask must be 0 or 1, 0 on the first token and 1 on at least one")
    if versions.min() < 0 or versions.max() > limits.version:
        return bad(f"weight versions go from {versions.min()} to {versions.max()}; there are 0 to {limits.version}")
    # Written so that NaN fails: it compares false with everything.
    if not ((logprobs[trained] > -np.inf) & (logprobs[trained] <= LOGPROB_TOLERANCE)).all():
        return bad("a generated token's logprob is positive or not finite")
    return EchoedRow(
        columns={
            "input_ids": ids,
            "loss_mask": trained.astype(np.uint8),
            "rollout_logprobs": np.where(trained, logprobs, np.float32(0)),
            "weight_versions": versions,
        },
        loss_tokens=int(trained.sum()),
        oldest_version=int(versions[trained].min()),
    )


def size(tokens: Tokens | None) -> int:
    """How many tokens there seem to be."""
    ids: Any = None if tokens is None else tokens.input_ids
    return len(ids) if isinstance(ids, Sized) else 0


def _whole(values: Sequence[int]) -> npt.NDArray[np.int64] | None:
    array = _array(values)
    return array.astype(np.int64) if array is not None and array.dtype.kind in "iub" else None


def _numbers(values: Sequence[float]) -> npt.NDArray[np.float32] | None:
    array = _array(values)
    with np.errstate(over="ignore"):  # What does not fit becomes infinite, and is refused as that.
        return array.astype(np.float32) if array is not None and array.dtype.kind in "iuf" else None


def _array(values: Any) -> npt.NDArray[Any] | None:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        return None
    return array if array.ndim == 1 and array.size else None
