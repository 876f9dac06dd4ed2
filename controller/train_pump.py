"""The train pump: one optimizer step after another, from selected groups to new weights in every engine.

Invariant: a group is marked trained in the same loop turn in which the trainer's `finish_step` returned, and its rows are
cleared before anything can cancel that. A cancellation before `finish_step` leaves the groups selected, untrained.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np

from controller.advantages import Group, coin_flips, step_advantages
from controller.agreement import AgreementMonitor
from controller.batching import plan_microbatches
from controller.buffer import GroupEntry, ReplayBuffer
from controller.config.schema import AdvantageConfig, TrainingConfig
from controller.credit import Credit, row_weights
from controller.evaluation import Evaluator
from controller.losses import Losses
from controller.records import TrainSample
from controller.run_state import RunState
from controller.samplers import Sampler
from controller.waiting import BUFFER, EVALUATION, PLANE, SYNC, TRAIN_PUMP, TRAINER, Activities
from controller.weight_sync import WeightSync
from dataplane.errors import DataPlaneTimeout
from dataplane.plane import DataPlane
from dataplane.schema import TRAIN
from ledger.ledger import Ledger
from workers.rpc.client import RpcClient
from workers.training.api import (
    BEGIN_STEP,
    FINISH_STEP,
    LOGPROBS,
    TRAIN_MICROBATCH,
    BeginStep,
    FinishStep,
    Microbatch,
    RowKeys,
    StepMetrics,
    TrainRow,
)

_WAITS_FOR = {
    "wait_rollouts": BUFFER,
    "logprobs": TRAINER,
    "train": TRAINER,
    "clear": PLANE,
    "weight_sync": SYNC,
    "evaluate": EVALUATION,
    "checkpoint": TRAINER,
}

logger = logging.getLogger(__name__)

Samples = Sequence[tuple[GroupEntry, TrainSample, float]]
"""(group, sample, advantage) of each valid sample of a step."""


class TrainedStep:
    """What the train pump knows of a step that it has just finished; the reporter makes a StepReport of it."""

    def __init__(self, step: int, groups: Sequence[GroupEntry], samples: Samples, phases: dict[str, float]) -> None:
        self.step = step
        """0-based; the step that these groups trained."""
        self.groups = groups
        self.samples = samples
        self.phases = phases
        self.trainer: StepMetrics | None = None


class TrainPump:
    def __init__(
        self,
        *,
        training: TrainingConfig,
        advantage: AdvantageConfig,
        buffer: ReplayBuffer,
        state: RunState,
        sampler: Sampler,
        ledger: Ledger,
        plane: DataPlane,
        trainer: RpcClient,
        weight_sync: WeightSync,
        evaluator: Evaluator,
        agreement: AgreementMonitor,
        checkpoint: Callable[[], Awaitable[None]],
        checkpoint_every: int | None,
        report: Callable[[TrainedStep], None],
        after_step: Callable[[], Awaitable[None]],
        on_phase: Callable[[str, int, float, float], None],
        activities: Activities,
        losses: Losses | None = None,
        credit: Credit = "equal",
        seed: int = 0,
    ) -> None:
        self._training = training
        self._advantage = advantage
        self._credit: Credit = credit
        self._seed = seed
        self._buffer = buffer
        self._state = state
        self._first_step = state.step
        self._sampler = sampler
        self._ledger = ledger
        self._plane = plane
        self._trainer = trainer
        self._weight_sync = weight_sync
        self._evaluator = evaluator
        self._agreement = agreement
        self._checkpoint = checkpoint
        self._checkpoint_every = checkpoint_every
        self._report = report
        self._after_step = after_step
        self._on_phase = on_phase
        self._activities = activities
        self._losses = losses or Losses()
        self._to_clear: set[str] = set()

    async def run(self) -> None:
        """Train until the last step, or until no group can come any more."""
        while self._state.step < self._state.last_step:
            phases: dict[str, float] = {}
            await self._checkpoint_when_due(phases)
            await self._evaluate_when_due(phases)
            with self._phase("wait_rollouts", "waiting for a step's groups", phases):
                groups = await self._next_groups()
            if not groups:
                break
            await self._step(groups, phases)
        await self._evaluate_when_due({}, last=True)

    async def _evict(self) -> None:
        evicted = self._sampler.evict(self._state.view())
        if not evicted:
            return
        entries = [e for e in map(self._buffer.entries.get, evicted) if e is not None]
        with anyio.CancelScope(shield=True):
            for entry in entries:
                self._buffer.evict(entry.group_id)
                self._losses.evicted(entry.samples)
            await _record(self._ledger.evicted, entries)
            await self._clear(key for e in entries for s in e.samples for key in s.keys)

    async def _next_groups(self) -> list[GroupEntry]:
        """A step's groups. What becomes ready too late is evicted at once: it would keep others from being dispatched."""

        def decided() -> bool:
            view = self._state.view()
            return bool(self._sampler.evict(view)) or self._sampler.select(view) is not None

        while True:
            await self._buffer.wait_until(decided)
            await self._evict()
            chosen = self._sampler.select(self._state.view())
            if chosen is not None:
                return self._buffer.select(chosen)

    async def _step(self, groups: list[GroupEntry], phases: dict[str, float]) -> None:
        # In a thread: with thousands of groups it takes tens of milliseconds.
        samples = await anyio.to_thread.run_sync(self._with_advantages, groups)
        done = TrainedStep(self._state.step, groups, samples, phases)
        keys = [key for _, s, _ in done.samples for key in s.keys]
        await self._prepare(done, keys)
        with self._phase("train", f"training step {done.step}", phases):
            await self._train(done)
        try:
            with anyio.CancelScope(shield=True):
                with self._phase("clear", f"clearing the rows of step {done.step}", phases):
                    await _record(partial(self._ledger.trained, step=done.step), groups)
                    await self._clear(keys)
            if self._state.step < self._state.last_step or self._evaluator.due(last=True):
                with self._phase("weight_sync", f"synchronising weights after step {done.step}", phases):
                    await self._weight_sync.sync(self._state.step)
        finally:
            # A step that was trained is reported, also when the run ends here.
            self._report(done)
        assert done.trainer is not None
        self._agreement.check(done.step, done.trainer)
        await self._after_step()

    async def _clear(self, keys: Iterable[str]) -> None:
        """Rows that are needed no more. What is not cleared in time is cleared with the next ones, or swept in the end."""
        self._to_clear.update(keys)
        wanted = tuple(self._to_clear)
        try:
            await self._plane.clear(TRAIN, wanted)
        except DataPlaneTimeout as e:
            logger.warning("%d trained or evicted rows are not cleared yet: %s", len(wanted), e)
        else:
            self._to_clear.difference_update(wanted)

    async def _checkpoint_when_due(self, phases: dict[str, float]) -> None:
        """Between two steps, when the last one has been reported. The run's end saves the state after the last step."""
        step = self._state.step
        if self._checkpoint_every is None or step == self._first_step or step % self._checkpoint_every:
            return
        with self._phase("checkpoint", f"writing the checkpoint of step {step}", phases):
            await self._checkpoint()

    async def _evaluate_when_due(self, phases: dict[str, float], *, last: bool = False) -> None:
        """The engines serve the weights of the last step, and no other weights come before this returns."""
        if self._evaluator.due(last=last):
            with self._phase("evaluate", f"evaluating after step {self._state.step}", phases):
                await self._evaluator.evaluate()

    def _with_advantages(self, groups: Sequence[GroupEntry]) -> Samples:
        inputs: list[Group] = []
        for entry in groups:
            rewards = np.array([s.reward for s in entry.samples], dtype=np.float64)
            if self._advantage.rewards == "random":
                rewards = coin_flips(self._seed, entry.group_id, len(rewards))
            valid = np.array([s.valid for s in entry.samples])
            lengths = np.array([s.loss_tokens for s in entry.samples], dtype=np.int64)
            inputs.append(Group(rewards, valid, lengths))
        advantages = step_advantages(self._advantage.estimator, inputs)
        return [
            (entry, sample, float(advantage))
            for entry, of_group in zip(groups, advantages, strict=True)
            for sample, advantage in zip(entry.samples, of_group, strict=True)
            if sample.valid
        ]

    async def _prepare(self, done: TrainedStep, keys: list[str]) -> None:
        """Have the trainer compute the logprobs that the loss compares with, before the weights move."""
        loss = self._training.loss
        wanted: list[RowKeys] = []
        if loss.old_logprobs == "policy":
            wanted.append(RowKeys(step=done.step, partition=TRAIN, keys=tuple(keys), model="policy"))
        if loss.kl_coef > 0:
            wanted.append(RowKeys(step=done.step, partition=TRAIN, keys=tuple(keys), model="reference"))
        if not wanted:
            return
        with self._phase("logprobs", f"computing logprobs for step {done.step}", done.phases):
            for request in wanted:
                await self._trainer.call(LOGPROBS, request, timeout=self._training.step_timeout_s)

    def _rows(self, samples: Samples) -> list[TrainRow]:
        """All rows of a step. A rollout's rows share its advantage, and its credit."""
        tokens = [[row.loss_tokens for row in s.rows] for _, s, _ in samples]
        weights = row_weights(self._credit, self._training.loss.aggregation, tokens)
        return [
            TrainRow(key=row.key, advantage=advantage, length=row.length, weight=weight)
            for (_, s, advantage), factors in zip(samples, weights, strict=True)
            for row, weight in zip(s.rows, factors, strict=True)
        ]

    async def _train(self, done: TrainedStep) -> None:
        rows = self._rows(done.samples)
        begin = BeginStep(
            step=done.step, loss_tokens=sum(s.loss_tokens for _, s, _ in done.samples), sequences=len(rows)
        )
        timeout = self._training.step_timeout_s
        await self._trainer.call(BEGIN_STEP, begin, timeout=timeout)
        for index, batch in enumerate(plan_microbatches(rows, self._training.max_tokens_per_microbatch)):
            microbatch = Microbatch(step=done.step, index=index, partition=TRAIN, rows=batch)
            await self._trainer.call(TRAIN_MICROBATCH, microbatch, timeout=timeout)
        with anyio.CancelScope(shield=True):
            # Bounded by the call's own deadline. Once asked for, the optimizer step must not be half known.
            done.trainer = await self._trainer.call(FINISH_STEP, FinishStep(step=done.step), timeout=timeout)
            for entry in done.groups:
                self._buffer.trained(entry.group_id)
            self._state.step_done()

    @contextmanager
    def _phase(self, name: str, what: str, phases: dict[str, float]) -> Generator[None]:
        step, start = self._state.step, time.monotonic()
        with self._activities.doing(TRAIN_PUMP, what, on=_WAITS_FOR[name]):
            try:
                yield
            finally:
                end = time.monotonic()
                phases[name] = phases.get(name, 0.0) + end - start
                self._on_phase(name, step, start, end)


async def _record(end: Callable[[str], Coroutine[Any, Any, None]], groups: Iterable[GroupEntry]) -> None:
    """Put the groups' end on record, each in a turn of the loop, as there may be thousands, and the disk waited for once."""
    async with anyio.create_task_group() as tg:
        for entry in groups:
            tg.start_soon(end, entry.group_id)
            await anyio.lowlevel.checkpoint()
