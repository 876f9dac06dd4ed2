"""The finalizer group: turns played groups into verified training rows, or placeholders with a reason.

Invariant: a row is published only from a sealed receipt whose every staged row was read back and verified, unless token
capture is off, and never of a held-out group; staged rows of a group are cleared only after the group is ready or has ended.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypeAlias

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream
from msgspec.structs import replace

from controller import echo
from controller.buffer import ReplayBuffer
from controller.capture_alarm import CaptureAlarm
from controller.config.schema import FailuresConfig
from controller.losses import Losses
from controller.publish import Publisher
from controller.records import FinalizationRequest, PlayedRollout, TrainSample
from controller.staged import Rows, StagedCleaner, StagedReader
from controller.verdicts import Verdict, columns_of, sample_of
from controller.waiting import Activities
from dataplane.plane import DataPlane
from ledger.account import Stage
from ledger.branches import VerifiedRollout, verify_rollout
from ledger.ledger import Ledger
from ledger.reasons import Reason, Rejection
from ledger.receipts import Receipt

logger = logging.getLogger(__name__)

INLINE_TOKENS = 4096
"""Groups with fewer tokens are verified on the loop (under a millisecond); larger ones in a thread."""

OnFailure: TypeAlias = Literal["placeholder", "drop_group", "abort"]


class CustodyFailed(Exception):
    """A rollout's custody failed, and `token_capture.on_failure: abort` asks to end the run then."""

    def __init__(self, rollout_id: str, rejection: Rejection) -> None:
        super().__init__(
            f"rollout {rollout_id!r} cannot be trained: {rejection.reason} ({rejection.reason.meaning}): {rejection.detail}"
        )
        self.rollout_id = rollout_id
        self.rejection = rejection


class NothingTrainable(Exception):
    """Group after group was dropped. The message says why, by the most frequent reason."""

    def __init__(self, groups: int, rejections: Counter[str], last: Rejection) -> None:
        reasons = ", ".join(f"{reason} {count}" for reason, count in rejections.most_common())
        super().__init__(
            f"{groups} groups in a row were dropped and none could be trained. Rejected rollouts so far: {reasons}. "
            f"The last one: {last.reason}: {last.reason.meaning} ({last.detail}). docs/custody.md explains every reason; "
            "finalizer.max_dropped_in_a_row is the limit"
        )


class FinalizerGroup:
    """`concurrency` groups are finalized at a time.

    `echo_limits` says what tokens an environment may return; None when they are captured. A call that was given up can stage
    its row up to `late_after_s` later.
    """

    def __init__(
        self,
        *,
        requests: MemoryObjectReceiveStream[FinalizationRequest],
        buffer: ReplayBuffer,
        ledger: Ledger,
        plane: DataPlane,
        activities: Activities,
        concurrency: int,
        on_failure: OnFailure = "placeholder",
        echo_limits: Callable[[], echo.Limits] | None = None,
        late_after_s: float = 60.0,
        max_dropped_in_a_row: int = 64,
        warn: Callable[[str], None] = logger.warning,
        failures: FailuresConfig | None = None,
        losses: Losses | None = None,
        evaluated: Callable[[str, Sequence[TrainSample]], None] = lambda _, __: None,
    ) -> None:
        self._requests = requests
        self._buffer = buffer
        self._ledger = ledger
        self._activities = activities
        self._concurrency = concurrency
        self._on_failure: OnFailure = on_failure
        self._max_dropped_in_a_row = max_dropped_in_a_row
        self._dropped_in_a_row = 0
        self._warn = warn
        self._failures = failures or FailuresConfig()
        self._losses = losses or Losses()
        self._alarm = CaptureAlarm(self._failures, warn)
        self._evaluated = evaluated
        self._echo_limits = echo_limits
        self._timings: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._reader = StagedReader(plane, self._counts)
        self._publisher = Publisher(plane, self._counts)
        self._cleaner = StagedCleaner(plane, self._counts, late_after_s=late_after_s)
        self.committed = 0
        """Groups that became ready."""
        self.rejections: Counter[str] = Counter()
        """Rollouts that could not be proven, by reason code."""

    def take_timings(self) -> dict[str, float]:
        """Seconds spent in fetch, verify, publish and clear since the last call."""
        taken, self._timings = self._timings, {}
        return taken

    def take_counts(self) -> dict[str, int]:
        """What was done since the last call: rollouts verified, unproven and rejected (also by reason), rows published and
        conversations left out, reads, rows read and cleared, ..."""
        taken = dict(self._counts)
        self._counts.clear()
        return taken

    async def run(self) -> None:
        """Finalize until the request stream ends. Raises CustodyFailed, DataPlaneDown."""
        async with anyio.create_task_group() as tg:
            for i in range(self._concurrency):
                tg.start_soon(self._work, f"finalizer {i}")

    async def _work(self, name: str) -> None:
        # Streams may be shared: each request goes to one worker.
        async for request in self._requests:
            with self._activities.doing(name, f"finalizing group {request.group_id}"):
                await self._finalize(request)

    async def _finalize(self, request: FinalizationRequest) -> None:
        if request.aborted:
            await self._give_up(request)
            return
        generated = {r.rollout_id: self._ledger.generated(r.rollout_id) for r in request.rollouts}
        receipts = await self._seal(request.rollouts)
        verdicts = await self._verdicts(request.rollouts, receipts)
        if request.evaluation is not None:
            await self._conclude(request, request.evaluation, receipts, verdicts)
            return
        failed = None if self._on_failure == "placeholder" else _failed(verdicts)
        raised = sum(rollout.failure is Reason.ENVIRONMENT_FAILED for rollout in request.rollouts)
        why = Reason.NO_VALID_ROLLOUT if failed is None else failed[1].reason
        if raised > self._failures.max_failed_per_prompt:
            why = Reason.PROMPT_FAILED
        elif failed is None:
            verdicts = await self._publish(verdicts)
        samples = [
            replace(sample_of(rollout, verdicts[rollout.rollout_id]), generated=generated[rollout.rollout_id])
            for rollout in request.rollouts
        ]
        for rollout_id, verdict in verdicts.items():
            self._count(rollout_id, verdict)
        with anyio.CancelScope(shield=True):
            await self._record(samples, verdicts)
            if failed is not None and self._on_failure == "abort":
                raise CustodyFailed(*failed)
            kept = why is Reason.NO_VALID_ROLLOUT and any(sample.valid for sample in samples)
            self._losses.played(samples, None if kept else why)
            if kept:
                await self._ledger.committed(request.group_id)
                self._buffer.commit_finalized(request.group_id, samples)
                self.committed += 1
                self._dropped_in_a_row = 0
            else:
                self._buffer.drop(request.group_id)
                self._dropped_in_a_row += 1
                await self._ledger.dropped(request.group_id, reason=why)
            await self._clear(request.rollouts, receipts)
            if self._dropped_in_a_row >= self._max_dropped_in_a_row:
                last = next((v for v in reversed(verdicts.values()) if isinstance(v, Rejection)), None)
                last = last or Rejection(why, why.meaning)
                raise NothingTrainable(self._dropped_in_a_row, self.rejections, last)

    async def _conclude(
        self, request: FinalizationRequest, step: int, receipts: Sequence[Receipt], verdicts: Mapping[str, Verdict]
    ) -> None:
        """End a held-out group, and hand its samples to the evaluation after `step` steps."""
        samples = [sample_of(rollout, verdicts[rollout.rollout_id]) for rollout in request.rollouts]
        with anyio.CancelScope(shield=True):
            await self._record(samples, verdicts)
            await self._ledger.evaluated(request.group_id, step=step)
            await self._clear(request.rollouts, receipts)
            self._evaluated(request.group_id, samples)

    async def _give_up(self, request: FinalizationRequest) -> None:
        """End a group that is not played any more, and clear what its rollouts staged, or will have staged in a moment."""
        stages = self._ledger.stages(request.group_id)
        with anyio.CancelScope(shield=True):
            receipts: list[Receipt] = []
            for rollout_id in (r for r, stage in stages.items() if not stage.finished):
                if stages[rollout_id] is Stage.RUNNING:
                    self._losses.aborted(self._ledger.generated(rollout_id))
                    receipts.append(await self._ledger.abort(rollout_id, request.aborted))
            self._buffer.abort(request.group_id)
            await self._ledger.aborted(request.group_id, request.aborted)
            with self._phase("clear"):
                await self._cleaner.clear(receipts, stages)

    async def _clear(self, rollouts: Sequence[PlayedRollout], receipts: Sequence[Receipt]) -> None:
        """Clear what the rollouts staged, and those that were lost and played again."""
        lost = [receipt for rollout in rollouts for receipt in rollout.lost]
        with self._phase("clear"):
            await self._cleaner.clear(
                [*receipts, *lost], [rollout.rollout_id for rollout in rollouts if rollout.attempts_lost]
            )

    async def _seal(self, rollouts: Sequence[PlayedRollout]) -> list[Receipt]:
        """The receipts, in the order of the rollouts."""
        receipts: dict[str, Receipt] = {}

        async def seal(rollout: PlayedRollout) -> None:
            receipt = await self._ledger.seal_once(rollout.rollout_id, failure=rollout.failure)
            if rollout.detail:
                rejections = (
                    replace(r, detail=rollout.detail) if r.reason is rollout.failure else r for r in receipt.rejections
                )
                receipt = replace(receipt, rejections=tuple(rejections))
            receipts[rollout.rollout_id] = receipt

        async with anyio.create_task_group() as tg:
            for rollout in rollouts:
                tg.start_soon(seal, rollout)
        return [receipts[rollout.rollout_id] for rollout in rollouts]

    async def _verdicts(self, rollouts: Sequence[PlayedRollout], receipts: Sequence[Receipt]) -> dict[str, Verdict]:
        """By rollout id, in the order of the rollouts."""
        if self._echo_limits is None:
            return await self._verify(receipts)
        with self._phase("verify"):
            check = partial(_check_all, rollouts, receipts, self._echo_limits())
            if sum(echo.size(rollout.tokens) for rollout in rollouts) <= INLINE_TOKENS:
                return check()
            return await anyio.to_thread.run_sync(check)

    async def _verify(self, receipts: Sequence[Receipt]) -> dict[str, Verdict]:
        links = [link for r in receipts if not r.rejections for chain in r.conversations for link in chain]
        with self._phase("fetch"):
            rows = await self._reader.read(links)
        with self._phase("verify"):
            if sum(link.delta_len for link in links) <= INLINE_TOKENS:
                return _verify_all(receipts, rows)
            return await anyio.to_thread.run_sync(_verify_all, receipts, rows)

    async def _publish(self, verdicts: dict[str, Verdict]) -> dict[str, Verdict]:
        """The verdicts, those on rows that the data plane did not take turned into rejections."""
        rows = {
            key: row for rollout_id, verdict in verdicts.items() for key, row in columns_of(rollout_id, verdict).items()
        }
        if not rows:
            return verdicts
        with self._phase("publish"):
            problem = await self._publisher.publish(rows)
        if problem is None:
            self._counts["rows_published"] += len(rows)
            return verdicts
        lost = Rejection(Reason.NOT_PUBLISHED, problem)
        return {k: v if isinstance(v, Rejection) else lost for k, v in verdicts.items()}

    async def _record(self, samples: Sequence[TrainSample], verdicts: Mapping[str, Verdict]) -> None:
        async with anyio.create_task_group() as tg:
            for sample in samples:
                verdict = verdicts[sample.rollout_id]
                reason, detail = (verdict.reason, verdict.detail) if isinstance(verdict, Rejection) else (None, "")
                tg.start_soon(self._ledger.finalize, sample.rollout_id, reason, detail)

    def _count(self, rollout_id: str, verdict: Verdict) -> None:
        self._alarm.ended(failed=isinstance(verdict, Rejection) and verdict.failure_class == "capture")
        match verdict:
            case Rejection():
                if str(verdict.reason) not in self.rejections:
                    detail = "" if verdict.detail in ("", verdict.reason.meaning) else f" ({verdict.detail})"
                    why = f"{verdict.reason}, {verdict.reason.meaning}{detail}"
                    self._warn(f"rollout {rollout_id} is not trained: {why}; others of this kind are only counted")
                self.rejections[str(verdict.reason)] += 1
                self._counts["rejected"] += 1
                self._counts[f"rejected_{verdict.reason}"] += 1
                self._counts[f"rejected_class_{verdict.failure_class}"] += 1
            case echo.EchoedRow():
                self._counts["unproven"] += 1
            case VerifiedRollout():
                self._counts["verified"] += 1
                self._counts["conversations_left_out"] += len(verdict.left_out)

    @contextmanager
    def _phase(self, name: str) -> Generator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._timings[name] = self._timings.get(name, 0.0) + time.monotonic() - start


def _failed(verdicts: Mapping[str, Verdict]) -> tuple[str, Rejection] | None:
    """The first rollout whose custody failed."""
    for rollout_id, verdict in verdicts.items():
        if isinstance(verdict, Rejection) and not verdict.reason.of_the_rollout:
            return rollout_id, verdict
    return None


def _check_all(
    rollouts: Sequence[PlayedRollout], receipts: Sequence[Receipt], limits: echo.Limits
) -> dict[str, Verdict]:
    return {
        rollout.rollout_id: receipt.rejections[0] if receipt.rejections else echo.echoed_row(rollout.tokens, limits)
        for rollout, receipt in zip(rollouts, receipts, strict=True)
    }


def _verify_all(receipts: Sequence[Receipt], rows: Rows) -> dict[str, Verdict]:
    return {receipt.rollout_id: verify_rollout(receipt, rows) for receipt in receipts}
