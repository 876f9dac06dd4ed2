"""Step reports for the tests."""

from __future__ import annotations

from typing import Any

from controller.reporting.frame import Frame, ProgressSnapshot
from controller.reporting.step_report import StepReport


def step_report(step: int, **changes: Any) -> StepReport:
    fields: dict[str, Any] = {
        "step": step,
        "time": 1.79e9 + step,
        "seconds": 4.0,
        "reward_mean": step / 100,
        "reward_std": 0.2,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "tokens_per_s": 1840.0,
        "groups": 16,
        "rollouts": 128,
        "placeholders": 1,
        "completion_tokens": 7360,
        "completion_length_mean": 57.5,
        "truncated_fraction": 0.02,
        "zero_spread_groups": 2,
        "phases": {"wait_rollouts": 2.0, "train": 1.5, "clear": 0.01, "weight_sync": 0.4},
        "counts": {"dispatched": 300, "trained": 128 * step, "live": 172},
        "buffer": {"generating": 14, "ready": 3},
        "trainer": {"loss": 0.01, "grad_norm": 0.4, "lr": 1e-5, "entropy": 1.1},
        "agreement": {
            "difference_mean": 0.02,
            "kl": 2e-4,
            "age_0_difference_mean": 0.001,
            "age_1_difference_mean": 0.03,
        },
        "environment": {"accuracy": 0.4},
        "data_plane": {"fetch": 0.1, "clear": 0.01},
    }
    return StepReport(**fields | changes)


def snapshot(step: int = 0, activity: str = "waiting for rollouts", since: float = 0.0) -> ProgressSnapshot:
    return ProgressSnapshot(
        step=step,
        activity=activity,
        activity_since=since,
        rollouts={"generating": 112, "scoring": 9, "finalizing": 7},
        buffer={"generating": 14, "ready": 3},
        weight_version=step,
    )


def frame(**changes: Any) -> Frame:
    fields: dict[str, Any] = {
        "name": "a-run",
        "steps": 40,
        "step": 3,
        "elapsed_s": 12.0,
        "activity": "training",
        "activity_s": 0.5,
        "snapshot": snapshot(3),
        "latest": step_report(3),
        "rewards": (0.1, 0.2, 0.3),
        "eta_s": 148.0,
        "warnings": (),
    }
    return Frame(**fields | changes)
