"""Model calls that all have the same tokens: proven like any other, at no cost, and with no row to be kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import anyio.lowlevel
import numpy as np

from dataplane.memory import MemoryPlane
from dataplane.plane import Column
from dataplane.schema import STAGING
from ledger.records import CallCoords, CallReply, CallRequest, WeightSpan
from tests.ledger.worker import Row
from tests.ledger.worker import answer as proven_answer

TOKENS = 4
"""Generated, in each call; the prompt's new ones are as many again."""
ANSWER = "The answer is 84."

_IDS = np.arange(2 * TOKENS, dtype=np.int64)
_MASK = np.repeat([0, 1], TOKENS).astype(np.uint8)
_LOGPROBS = np.where(_MASK, -0.5, 0).astype(np.float32)


def answer(request: CallRequest, version: int = 0) -> CallReply:
    """The call's answer, as a worker proves it, sampled under weight `version`. A conversation repeats one call's tokens."""
    before = 0 if request.parent is None else request.parent.cum_len // _IDS.size
    return proven_answer(
        request,
        Row(_IDS, _MASK, _LOGPROBS, np.full(_IDS.size, version)),
        carry_len=TOKENS,
        spans=(WeightSpan(version, 0, TOKENS),),
        text=ANSWER,
        tokens=np.tile(_IDS, before + 1),
    )


class ConstantPlane(MemoryPlane):
    """Has the rows of the calls that it was told were `staged`, and keeps what else is put."""

    def __init__(self) -> None:
        super().__init__()
        self._versions: dict[str, int] = {}

    def staged(self, coords: CallCoords) -> None:
        self._versions[coords.staging_key] = coords.weight_spans[0].version

    async def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str], *, timeout: float | None = None
    ) -> list[dict[str, Column]]:
        if partition != STAGING:
            return await super().get(partition, keys, columns)
        await anyio.lowlevel.checkpoint()
        constant = {"token_ids": _IDS, "token_mask": _MASK, "logprobs": _LOGPROBS}
        return [constant | {"weight_versions": np.full(_IDS.size, self._versions[key])} for key in keys]

    async def clear(self, partition: str, keys: Collection[str], *, timeout: float | None = None) -> int:
        if partition != STAGING:
            return await super().clear(partition, keys)
        await anyio.lowlevel.checkpoint()
        return sum(self._versions.pop(key, None) is not None for key in keys)

    async def keys(self, partition: str, *, prefix: str = "", timeout: float | None = None) -> list[str]:
        if partition != STAGING:
            return await super().keys(partition, prefix=prefix)
        await anyio.lowlevel.checkpoint()
        return sorted(key for key in self._versions if key.startswith(prefix))
