"""Model calls that all have the same tokens: proven like any other, at no cost, and with no row to be kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import anyio.lowlevel
import numpy as np

from dataplane.memory import MemoryPlane
from dataplane.plane import Column
from dataplane.schema import STAGING
from ledger.digests import call_digest, call_extras, chain_hash, cumulative_hash, extras_digest
from ledger.ids import staging_key
from ledger.records import CallCoords, CallReply, CallRequest, Message, WeightSpan

TOKENS = 4
"""Generated, in each call; the prompt's new ones are as many again."""
ANSWER = "The answer is 84."

_IDS = np.arange(2 * TOKENS, dtype=np.int64)
_MASK = np.repeat([0, 1], TOKENS).astype(np.uint8)
_LOGPROBS = np.where(_MASK, -0.5, 0).astype(np.float32)


def answer(request: CallRequest, version: int = 0) -> CallReply:
    """The call's answer, as a worker proves it, sampled under weight `version`. A conversation repeats one call's tokens."""
    spans = (WeightSpan(version, 0, TOKENS),)
    extras = extras_digest(call_extras(spans, "stop"))
    parent = request.parent
    prev_len = 0 if parent is None else parent.cum_len
    parent_call_id = None if parent is None else parent.call_id
    chain = chain_hash(None if parent is None else parent.chain_hash, _IDS)
    cumulative = cumulative_hash(np.tile(_IDS, prev_len // _IDS.size + 1))
    digest = call_digest(
        rollout_id=request.rollout_id,
        call_id=request.call_id,
        parent_call_id=parent_call_id,
        prev_len=prev_len,
        weight_version=version,
        token_ids=_IDS,
        token_mask=_MASK,
        logprobs=_LOGPROBS,
        extras_digest=extras,
        chain_hash=chain,
        cumulative_hash=cumulative,
    )
    coords = CallCoords(
        call_id=request.call_id,
        parent_call_id=parent_call_id,
        staging_key=staging_key(request.call_id, digest),
        prev_len=prev_len,
        carry_len=TOKENS,
        delta_len=2 * TOKENS,
        weight_spans=spans,
        digest=digest,
        extras_digest=extras,
        chain_hash=chain,
        cumulative_hash=cumulative,
    )
    return CallReply(
        coords=coords,
        message=Message(role="assistant", content=ANSWER),
        finish_reason="stop",
        prompt_tokens=prev_len + TOKENS,
        completion_tokens=TOKENS,
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
