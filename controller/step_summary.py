"""Makes the report of a finished step from what the pumps know. The reward mean counts every rollout played."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from controller.agreement import flattened
from controller.buffer import ReplayBuffer
from controller.records import metric_means
from controller.reporting.step_report import StepReport
from controller.train_pump import TrainedStep


def summarise(
    done: TrainedStep,
    *,
    seconds: float,
    counts: Mapping[str, int],
    buffer: ReplayBuffer,
    data_plane: Mapping[str, float],
    custody: Mapping[str, int] | None = None,
    loop: Mapping[str, float] | None = None,
    fleet: Mapping[str, float] | None = None,
    losses: Mapping[str, float] | None = None,
) -> StepReport:
    """`seconds`: wall time since the previous step ended. `counts`: rollouts so far by end.

    `data_plane`: seconds per phase of the finalizers, and the plane's own metrics; `custody`: what the finalizers counted;
    all since the previous step.
    """
    samples = [s for entry in done.groups for s in entry.samples]
    trained = [s for s in samples if s.valid]
    rewards = np.array([s.reward for s in samples])
    staleness = np.array([done.step - s.oldest_version for s in trained])
    tokens = sum(s.loss_tokens for s in trained)
    trainer: dict[str, Any] = {} if done.trainer is None else msgspec.structs.asdict(done.trainer)
    for name in ("agreement", "agreement_by_age"):
        trainer.pop(name, None)
    return StepReport(
        step=done.step + 1,
        time=time.time(),
        seconds=seconds,
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        staleness_mean=float(staleness.mean()),
        staleness_max=float(staleness.max()),
        tokens_per_s=tokens / seconds,
        groups=len(done.groups),
        rollouts=len(samples),
        placeholders=len(samples) - len(trained),
        completion_tokens=tokens,
        completion_length_mean=tokens / len(trained),
        truncated_fraction=sum(s.truncated for s in trained) / len(trained),
        zero_spread_groups=sum(len({s.reward for s in e.samples if s.valid}) == 1 for e in done.groups),
        phases=dict(done.phases),
        counts=dict(counts),
        buffer=buffer.counts(),
        trainer=trainer,
        agreement={} if done.trainer is None else {**flattened(done.trainer)},
        environment=metric_means(samples),
        data_plane=dict(data_plane),
        custody={name: float(count) for name, count in (custody or {}).items()},
        fleet=dict(fleet or {}),
        losses=dict(losses or {}),
        loop=dict(loop or {}),
        rows=sum(len(s.rows) for s in trained),
        unproven=sum(not s.proven for s in trained),
    )
