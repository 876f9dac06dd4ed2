"""`EvaluationReport`: what one evaluation on held-out prompts found, and one line of evaluations.jsonl."""

from __future__ import annotations

from msgspec import Struct


class EvaluationReport(Struct, frozen=True, kw_only=True):
    step: int
    """Optimizer steps done before it; also the weight version that it played."""
    time: float
    """Unix time, s, at its end."""
    seconds: float
    questions: int
    samples: int
    """Rollouts per question."""
    reward_mean: float
    """Over all rollouts."""
    reward_error: float | None
    """Standard error of that mean over the questions; None for a single one."""
    reward_best: float
    """Mean over the questions of the best of their samples: pass@k, where a reward is 0 or 1."""
    environment: dict[str, float | None]
    """Mean of each metric that the environment gave beside the reward."""
    completion_length_mean: float | None
    """Tokens, of the rollouts whose custody was proven."""
    truncated_fraction: float | None
    rejected: int = 0
    """Rollouts that could not be proven, such as those that timed out. The reward that they were given counts."""
    oldest_version: int | None = None
    """Oldest weight version among all tokens: `step`."""

    @property
    def metrics(self) -> dict[str, float]:
        """As in `StepReport.metrics`."""
        numbers: dict[str, float | None] = {
            "reward_mean": self.reward_mean,
            "reward_error": self.reward_error,
            "reward_best": self.reward_best,
            "completion_length_mean": self.completion_length_mean,
            "truncated_fraction": self.truncated_fraction,
            "rejected": float(self.rejected),
            "seconds": self.seconds,
            **self.environment,
        }
        return {f"evaluation/{name}": float(value) for name, value in numbers.items() if value is not None}
