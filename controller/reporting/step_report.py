"""`StepReport`: all that is reported about one optimizer step, and one line of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

PHASES = ("evaluate", "wait_rollouts", "logprobs", "train", "clear", "weight_sync", "checkpoint")
"""The parts of a step's wall time, in order."""


class StepReport(Struct, frozen=True, kw_only=True):
    """Numbers are finite or None (not measured): JSON has no NaN, and a plot no place for it. A NaN or infinity given here
    becomes None (null in the file) and is named in `not_finite`. Other number types (numpy, torch scalars) become float."""

    step: int
    """Finished optimizer steps, this one included: the first is 1."""
    time: float
    """Unix time, s, at the end of the step."""
    seconds: float
    """Wall time since the previous step ended."""
    reward_mean: float | None
    """Over the step's rollouts, placeholders included: they were played and scored."""
    reward_std: float | None
    staleness_mean: float | None
    """In optimizer steps, over trained rollouts: the trainer's version at training minus the oldest token's version."""
    staleness_max: float | None
    tokens_per_s: float | None
    """Completion tokens trained / `seconds`."""
    groups: int
    rollouts: int
    """Trained rollouts and placeholders."""
    placeholders: int
    completion_tokens: int
    completion_length_mean: float | None
    truncated_fraction: float | None
    """Share of rollouts that ended at a length limit."""
    zero_spread_groups: int
    """Groups whose rewards are all equal, so that they teach nothing under a group baseline."""
    phases: dict[str, float | None]
    """Seconds by name of `PHASES`."""
    counts: dict[str, int]
    """Rollouts of the run so far: dispatched, trained, evicted, dropped, aborted, live."""
    buffer: dict[str, int]
    """Groups by state at the end of the step."""
    trainer: dict[str, float | None]
    """loss, grad_norm, lr, entropy, clip_fraction, ... (see `workers.training.api.StepMetrics`)."""
    environment: dict[str, float | None]
    """Mean of each metric that the environment gave beside the reward."""
    data_plane: dict[str, float | None]
    """Seconds that the finalizers spent in fetch, verify, publish and clear; and of the controller's own calls since the
    previous step `put_calls`, `put_s`, `put_max_s`, likewise get, clear and keys, `timeouts`, `retries`, ... (see
    `dataplane.transferqueue.TransferQueuePlane.take_metrics`)."""
    agreement: dict[str, float | None] = {}
    """Trainer against engines: difference_mean, difference_max, kl, ratio_p01 ... ratio_p99, tokens; of the step's tokens,
    and with `age_<n>_` before the name of those sampled n steps before (see `workers.training.api.Agreement`)."""
    custody: dict[str, float | None] = {}
    """What the finalizers counted since the previous step: rollouts verified, unproven and rejected (by reason too), reads
    of staged rows and those that failed, rows read, published and cleared, ..."""
    fleet: dict[str, float | None] = {}
    """Generation workers serving, calls that wait for one, calls that they may have; and, counted since the run's process
    began, workers quarantined, restarted and retired, calls tried again and lost, rollouts lost and played again."""
    losses: dict[str, float | None] = {}
    """Shares of the rollouts that were played and not trained, since the run's process began: of all of them, and of each
    tenth by length (see `controller.losses`)."""
    loop: dict[str, float | None] = {}
    """How late the event loop ran what was due, in ms, since the previous step; see `controller.sentinel.lag`."""
    rows: int | None = None
    """Rows trained: one per rollout, unless every conversation of a rollout is trained."""
    unproven: int = 0
    """Trained rollouts whose tokens the environment returned itself (`token_capture.enabled: false`)."""
    not_finite: tuple[str, ...] = ()
    """Numbers that were NaN or infinite, such as `trainer/loss` of a run that has diverged. Found, not to be given."""

    def __post_init__(self) -> None:
        found = list(self.not_finite)
        for name in _NUMBERS:
            structs.force_setattr(self, name, _finite(getattr(self, name), name, found))
        for name in _MAPPINGS:
            mapping: Mapping[str, Any] = getattr(self, name)
            finite = {key: _finite(value, f"{name}/{key}", found) for key, value in mapping.items()}
            structs.force_setattr(self, name, finite)
        structs.force_setattr(self, "not_finite", tuple(found))

    @property
    def metrics(self) -> dict[str, float]:
        """Flat and finite, by the tag that TensorBoard shows; the part before the slash is its section."""
        numbers: dict[str, float | None] = {
            "reward/mean": self.reward_mean,
            "reward/std": self.reward_std,
            "staleness/mean": self.staleness_mean,
            "staleness/max": self.staleness_max,
            "throughput/tokens_per_s": self.tokens_per_s,
            "throughput/completion_tokens": float(self.completion_tokens),
            "completion/length_mean": self.completion_length_mean,
            "completion/truncated_fraction": self.truncated_fraction,
            "step/groups": float(self.groups),
            "step/rollouts": float(self.rollouts),
            "step/placeholders": float(self.placeholders),
            "step/zero_spread_groups": float(self.zero_spread_groups),
            "step/rows": None if self.rows is None else float(self.rows),
            "step/unproven": float(self.unproven),
            "time/step": self.seconds,
        }
        sections: dict[str, Mapping[str, float | None]] = {
            "time": self.phases,
            "rollouts": self.counts,
            "buffer": self.buffer,
            "trainer": self.trainer,
            "agreement": self.agreement,
            "environment": self.environment,
            "data_plane": self.data_plane,
            "custody": self.custody,
            "losses": self.losses,
            "loop": self.loop,
            "fleet": self.fleet,
        }
        for section, mapping in sections.items():
            numbers.update({f"{section}/{name}": value for name, value in mapping.items()})
        return {tag: float(value) for tag, value in numbers.items() if value is not None}


_NUMBERS = (
    "reward_mean",
    "reward_std",
    "staleness_mean",
    "staleness_max",
    "tokens_per_s",
    "completion_length_mean",
    "truncated_fraction",
)
_MAPPINGS = ("phases", "trainer", "agreement", "environment", "data_plane", "custody", "losses", "loop", "fleet")


def _finite(value: Any, name: str, not_finite: list[str]) -> float | None:
    """The value as a float; None, with its name added to `not_finite`, when it is NaN or infinite."""
    if value is None:
        return None
    number = float(value)
    if math.isfinite(number):
        return number
    not_finite.append(name)
    return None
