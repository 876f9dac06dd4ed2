"""The agreement monitor: trainer and engines must give a token about the same probability, or what is trained is noise.

A step whose mean difference is above a threshold raises an alarm; a number of alarms in a row can end the run.
"""

from __future__ import annotations

from collections.abc import Callable

from controller.config.schema import AgreementConfig
from workers.training.api import RATIO_QUANTILES, Agreement, StepMetrics


class Disagreement(Exception):
    """The logprobs of trainer and engines differed too much, step after step."""


class AgreementMonitor:
    def __init__(self, config: AgreementConfig, *, warn: Callable[[str], None]) -> None:
        self._config = config
        self._warn = warn
        self._in_a_row = 0

    def check(self, step: int, metrics: StepMetrics) -> None:
        """Judge what the trainer measured in step `step` (0-based). Raises Disagreement when it is time to end the run."""
        fresh = metrics.agreement_by_age.get(0)
        if _above(fresh, self._config.max_fresh_difference):
            text = f"agreement.max_fresh_difference {self._config.max_fresh_difference:g} ({_ages(metrics)}). {_FAULT}"
        elif _above(metrics.agreement, self._config.max_difference):
            text = f"agreement.max_difference {self._config.max_difference:g} ({_ages(metrics)}). {_DRIFT}"
        else:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        text = f"step {step + 1}: the trainer's logprobs differ from the engines' by more than {text}"
        if self._config.abort_after is not None and self._in_a_row >= self._config.abort_after:
            raise Disagreement(f"{text} ({self._in_a_row} steps in a row; agreement.abort_after is the limit)")
        self._warn(text)


_FAULT = (
    "Tokens of age 0 were sampled with the trainer's own weights: engine and trainer compute different distributions "
    "(another dtype, a sampling parameter, weights that were not loaded)"
)
_DRIFT = "Ages count the steps since a token's weights: the policy may move fast; lower the rate or max_staleness"


def _above(agreement: Agreement | None, limit: float | None) -> bool:
    # Written so that NaN is above: it compares false with everything.
    return agreement is not None and limit is not None and not agreement.difference_mean <= limit


def _ages(metrics: StepMetrics) -> str:
    by_age = sorted(metrics.agreement_by_age.items())
    ages = [f"{a.difference_mean:.3g} on {a.tokens} tokens of age {age}" for age, a in by_age]
    return f"mean difference {metrics.agreement.difference_mean:.3g} nats: {', '.join(ages)}"


def flattened(metrics: StepMetrics) -> dict[str, float]:
    """All of a step's agreement as numbers by name: `difference_mean`, ..., and `age_0_difference_mean`, ..."""
    out = _named(metrics.agreement, "")
    for age, agreement in sorted(metrics.agreement_by_age.items()):
        out |= _named(agreement, f"age_{age}_")
    return out


def _named(agreement: Agreement, prefix: str) -> dict[str, float]:
    quantiles = {
        f"ratio_p{round(q * 100):02d}": r for q, r in zip(RATIO_QUANTILES, agreement.ratio_quantiles, strict=True)
    }
    numbers = {
        "tokens": float(agreement.tokens),
        "difference_mean": agreement.difference_mean,
        "difference_max": agreement.difference_max,
        "kl": agreement.kl,
        **quantiles,
    }
    return {prefix + name: number for name, number in numbers.items()}
