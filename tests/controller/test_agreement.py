"""The agreement monitor warns of each step that is too far off, and ends the run when told to."""

from __future__ import annotations

import math

import pytest

from controller.agreement import AgreementMonitor, Disagreement, flattened
from controller.config.schema import AgreementConfig
from workers.training.api import Agreement, StepMetrics


def agreement(mean: float, tokens: int = 10) -> Agreement:
    return Agreement(
        tokens=tokens,
        difference_mean=mean,
        difference_max=2 * mean,
        kl=mean**2,
        ratio_quantiles=(0.8, 0.9, 1.0, 1.1, 1.2),
    )


def metrics(mean: float, **by_age: float) -> StepMetrics:
    return StepMetrics(
        loss=0.0,
        grad_norm=1.0,
        lr=1e-5,
        entropy=1.0,
        clip_fraction=0.0,
        ratio_mean=1.0,
        agreement=agreement(mean, tokens=20),
        agreement_by_age={int(age[1:]): agreement(value) for age, value in by_age.items()},
        kl_reference=None,
        tokens=20,
        seconds=1.0,
    )


def test_it_warns_above_the_threshold_and_names_each_age():
    warnings: list[str] = []
    monitor = AgreementMonitor(AgreementConfig(max_difference=0.5, max_fresh_difference=0.1), warn=warnings.append)
    monitor.check(0, metrics(0.5, a0=0.1, a1=0.9))
    assert warnings == []
    monitor.check(4, metrics(0.45, a0=0.2, a1=0.7))
    monitor.check(5, metrics(0.7, a0=0.01, a1=1.4))
    monitor.check(6, metrics(math.nan))
    fault, drift, not_finite = warnings
    assert fault.startswith(
        "step 5: the trainer's logprobs differ from the engines' by more than agreement.max_fresh_difference 0.1 "
        "(mean difference 0.45 nats: 0.2 on 10 tokens of age 0, 0.7 on 10 tokens of age 1)"
    )
    assert "weights that were not loaded" in fault
    assert "by more than agreement.max_difference 0.5 (mean difference 0.7 nats" in drift
    assert "the policy may move fast" in drift
    assert "mean difference nan" in not_finite


def test_alarms_end_the_run_only_in_a_row_and_only_where_asked_to():
    warnings: list[str] = []
    monitor = AgreementMonitor(AgreementConfig(max_difference=0.5, abort_after=2), warn=warnings.append)
    for step, mean in enumerate((0.9, 0.1, 0.9)):
        monitor.check(step, metrics(mean, a0=mean))
    with pytest.raises(Disagreement, match=r"step 4: .*2 steps in a row; agreement\.abort_after"):
        monitor.check(3, metrics(0.9, a0=0.9))
    never = AgreementConfig(max_difference=None, max_fresh_difference=None, abort_after=1)
    for patient in (AgreementConfig(max_difference=0.5), never):
        monitor = AgreementMonitor(patient, warn=warnings.append)
        for step in range(20):
            monitor.check(step, metrics(0.9))


def test_all_numbers_have_a_name():
    numbers = flattened(metrics(0.5, a0=0.25))
    assert numbers["difference_mean"] == 0.5
    assert numbers["age_0_difference_max"] == 0.5
    assert numbers["age_0_ratio_p01"] == 0.8
    assert numbers["ratio_p99"] == 1.2
    assert len(numbers) == 2 * 9
