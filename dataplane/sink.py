"""The token sink: stages each model call's tokens as one row; calls that end together share a put."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import numpy as np
import numpy.typing as npt

from dataplane.errors import BadRow, DataPlaneError, RowExists
from dataplane.plane import DataPlane, Row
from dataplane.schema import ROUTED_EXPERTS, STAGING

MAX_ROWS = 128
MAX_TOKENS = 262_144
"""Bounds of one put, unless a single row is larger."""


@dataclass(frozen=True)
class TokenDelta:
    """The tokens one model call added to its conversation: new prompt tokens, then generated tokens.

    All arrays are 1-D, and all but the last of equal length. `token_ids` int64. `token_mask` uint8: 0 prompt, 1 generated.
    `logprobs` float32: natural log under the sampling distribution; 0 on prompt tokens.
    `weight_versions` int64: the weights that produced each token; on prompt tokens, those of the first generated token.
    """

    token_ids: npt.NDArray[np.int64]
    token_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    weight_versions: npt.NDArray[np.int64]
    routed_experts: npt.NDArray[np.int16] | None = None
    """[tokens * layers * topk] where the engine says which experts it used (see `schema.ROUTED_EXPERTS`)."""


class TokenSink:
    """Stages deltas in the staging partition. A successful `stage` states that the tokens are kept.

    One put is in flight at a time; what gathers meanwhile shares the next one, which costs little more than a single row.
    """

    def __init__(self, plane: DataPlane, *, timeout: float | None = None) -> None:
        self._plane = plane
        self._timeout = timeout
        self._gathered: list[_Stage] = []
        self._put = anyio.Lock()

    async def stage(self, key: str, delta: TokenDelta) -> None:
        """Put one row under `key`.

        Raises the plane's errors, and then nothing is staged (or its outcome is unknown). A cancelled stage leaves the
        whole row or none of it.
        """
        stage = _Stage(key, _row(delta))
        self._gathered.append(stage)
        try:
            async with self._put:
                if stage in self._gathered:
                    # Bounded by the plane's deadline; others wait for this put too, so a cancellation must not end it.
                    with anyio.CancelScope(shield=True):
                        await self._put_together(self._take())
        finally:
            if stage in self._gathered:
                self._gathered.remove(stage)
        if stage.error is not None:
            raise stage.error

    def _take(self) -> list[_Stage]:
        """The oldest stages that can share a put: the same columns, different keys, a bounded size."""
        first = self._gathered[0]
        taken: dict[str, _Stage] = {}
        left: list[_Stage] = []
        tokens = 0
        for stage in self._gathered:
            tokens += stage.tokens
            fits = stage is first or (len(taken) < MAX_ROWS and tokens <= MAX_TOKENS)
            if fits and stage.key not in taken and stage.row.keys() == first.row.keys():
                taken[stage.key] = stage
            else:
                left.append(stage)
        self._gathered = left
        return list(taken.values())

    async def _put_together(self, stages: list[_Stage]) -> None:
        try:
            await self._plane.put(STAGING, {s.key: s.row for s in stages}, timeout=self._timeout)
        except (RowExists, BadRow) as error:
            if len(stages) == 1:
                stages[0].error = error
                return
            for stage in stages:  # One row is at fault; the others must not fail with it.
                await self._put_together([stage])
        except DataPlaneError as error:
            for stage in stages:
                stage.error = error


@dataclass(eq=False)
class _Stage:
    key: str
    row: Row
    error: DataPlaneError | None = None

    @property
    def tokens(self) -> int:
        return self.row["token_ids"].size


def _row(delta: TokenDelta) -> Row:
    row = {
        "token_ids": delta.token_ids,
        "token_mask": delta.token_mask,
        "logprobs": delta.logprobs,
        "weight_versions": delta.weight_versions,
    }
    return row if delta.routed_experts is None else row | {ROUTED_EXPERTS: delta.routed_experts}
