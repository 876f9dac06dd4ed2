"""The finalizer group: turns played groups into verified training rows, or placeholders with a reason.

Invariant: a row is published only from a sealed receipt whose every on-chain row was read back and verified; staged rows of
a group are cleared only after the group is ready or dropped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream

from controller.buffer import ReplayBuffer
from controller.records import FinalizationRequest, PlayedRollout, TrainSample
from controller.waiting import Activities
from dataplane.errors import RowGone
from dataplane.plane import Column, DataPlane
from dataplane.schema import STAGING, STAGING_COLUMNS, TRAIN
from dataplane.sink import TokenDelta
from ledger.ledger import Ledger
from ledger.reasons import Reason
from ledger.receipts import Receipt
from ledger.verify import Rejection, VerifiedRow, verify

INLINE_TOKENS = 4096
"""Groups with fewer tokens are verified on the loop (under a millisecond); larger ones in a thread."""

Verdict = VerifiedRow | Rejection


class FinalizerGroup:
    """`concurrency` groups are finalized at a time. `timings` adds up seconds per phase since it was last taken."""

    def __init__(
        self,
        *,
        requests: MemoryObjectReceiveStream[FinalizationRequest],
        buffer: ReplayBuffer,
        ledger: Ledger,
        plane: DataPlane,
        activities: Activities,
        concurrency: int,
    ) -> None:
        self._requests = requests
        self._buffer = buffer
        self._ledger = ledger
        self._plane = plane
        self._activities = activities
        self._concurrency = concurrency
        self._timings: dict[str, float] = {}
        self.committed = 0
        """Groups that became ready."""
        self.rejections: Counter[str] = Counter()
        """Rollouts that could not be proven, by reason code."""

    def take_timings(self) -> dict[str, float]:
        """Seconds spent in fetch, verify, publish and clear since the last call."""
        taken, self._timings = self._timings, {}
        return taken

    async def run(self) -> None:
        """Finalize until the request stream ends."""
        async with anyio.create_task_group() as tg:
            for i in range(self._concurrency):
                tg.start_soon(self._work, f"finalizer {i}")

    async def _work(self, name: str) -> None:
        # Streams may be shared: each request goes to one worker.
        async for request in self._requests:
            with self._activities.doing(name, f"finalizing group {request.group_id}"):
                await self._finalize(request)

    async def _finalize(self, request: FinalizationRequest) -> None:
        receipts = {r.rollout_id: await self._seal(r) for r in request.rollouts}
        verdicts = await self._verify(list(receipts.values()))
        rows = {rid: v for rid, v in verdicts.items() if isinstance(v, VerifiedRow)}
        if rows:
            start = time.monotonic()
            await self._plane.put(TRAIN, {rid: _train_row(v) for rid, v in rows.items()})
            self._spent("publish", start)
        samples = [_sample(r, receipts[r.rollout_id], verdicts[r.rollout_id]) for r in request.rollouts]
        with anyio.CancelScope(shield=True):
            self.rejections.update(str(s.reason) for s in samples if s.reason is not None)
            for sample in samples:
                await self._ledger.finalize(sample.rollout_id, sample.reason, _detail(verdicts[sample.rollout_id]))
            if rows:
                await self._ledger.committed(request.group_id)
                self._buffer.commit_finalized(request.group_id, samples)
                self.committed += 1
            else:
                self._buffer.drop(request.group_id)
                await self._ledger.dropped(request.group_id, reason=Reason.NO_VALID_ROLLOUT)
            start = time.monotonic()
            await self._plane.clear(STAGING, await self._staged(list(receipts.values())))
            self._spent("clear", start)

    async def _staged(self, receipts: Sequence[Receipt]) -> list[str]:
        """All staging keys of a group, also those that a call without an answer may have staged."""
        keys = [key for receipt in receipts for key in receipt.staging_keys]
        for receipt in receipts:
            for call_id in receipt.orphans:
                keys += await self._plane.keys(STAGING, prefix=f"{call_id}-")
        return keys

    async def _seal(self, rollout: PlayedRollout) -> Receipt:
        return await self._ledger.seal(rollout.rollout_id, failure=rollout.failure)

    async def _verify(self, receipts: Sequence[Receipt]) -> dict[str, Verdict]:
        """A verdict per rollout id. One batched read; what is missing fails only the rollouts that need it."""
        verdicts: dict[str, Verdict] = {r.rollout_id: r.rejections[0] for r in receipts if r.rejections}
        pending: list[Receipt] = [r for r in receipts if not r.rejections]
        rows: dict[str, TokenDelta] = {}
        start = time.monotonic()
        while pending and not rows:
            keys = [link.staging_key for r in pending for link in r.chain]
            try:
                rows = dict(zip(keys, map(_delta, await self._plane.get(STAGING, keys, STAGING_COLUMNS)), strict=True))
            except RowGone as e:
                gone = set(e.keys)
                for receipt in pending:
                    lost = [link.staging_key for link in receipt.chain if link.staging_key in gone]
                    if lost:
                        verdicts[receipt.rollout_id] = Rejection(Reason.MISSING_ROW, f"no staged row {lost[0]}")
                remaining = [r for r in pending if r.rollout_id not in verdicts]
                if len(remaining) == len(pending):
                    raise
                pending = remaining
        self._spent("fetch", start)
        start = time.monotonic()
        if sum(len(row.token_ids) for row in rows.values()) <= INLINE_TOKENS:
            verdicts |= _verify_all(pending, rows)
        else:
            verdicts |= await anyio.to_thread.run_sync(_verify_all, pending, rows)
        self._spent("verify", start)
        return verdicts

    def _spent(self, phase: str, start: float) -> None:
        self._timings[phase] = self._timings.get(phase, 0.0) + time.monotonic() - start


def _verify_all(receipts: Sequence[Receipt], rows: Mapping[str, TokenDelta]) -> dict[str, Verdict]:
    return {r.rollout_id: verify(r, rows) for r in receipts}


def _delta(row: Mapping[str, Column]) -> TokenDelta:
    return TokenDelta(**{name: row[name] for name in STAGING_COLUMNS})


def _train_row(row: VerifiedRow) -> dict[str, Column]:
    return {
        "input_ids": row.input_ids,
        "loss_mask": row.loss_mask,
        "rollout_logprobs": row.rollout_logprobs,
        "weight_versions": row.weight_versions,
    }


def _detail(verdict: Verdict) -> str:
    return verdict.detail if isinstance(verdict, Rejection) else ""


def _sample(rollout: PlayedRollout, receipt: Receipt, verdict: Verdict) -> TrainSample:
    if isinstance(verdict, Rejection):
        return TrainSample(
            rollout_id=rollout.rollout_id,
            reward=rollout.reward,
            metrics=rollout.metrics,
            key=None,
            reason=verdict.reason,
        )
    return TrainSample(
        rollout_id=rollout.rollout_id,
        reward=rollout.reward,
        metrics=rollout.metrics,
        key=rollout.rollout_id,
        length=verdict.length,
        loss_tokens=verdict.loss_tokens,
        truncated=receipt.chain[-1].finish_reason == "length",
        oldest_version=verdict.oldest_version,
    )
