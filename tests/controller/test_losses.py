"""What is lost is counted by length, so that a bias shows; and what becomes too much of it is said, or ends the run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.capture_alarm import CaptureAlarm
from controller.config.schema import FailuresConfig
from controller.environment_budget import EnvironmentBudget
from controller.losses import DECILES, Losses, bias
from controller.records import SampleRow, TrainSample
from ledger.reasons import CallFailure, Reason, Rejection


def sample(generated: int, reason: Reason | None = None) -> TrainSample:
    rows = () if reason else (SampleRow(key="k", length=generated + 1, loss_tokens=generated),)
    return TrainSample(rollout_id="r", reward=0.0, metrics={}, rows=rows, reason=reason, generated=generated)


def test_losing_the_long_ones_shows() -> None:
    losses = Losses("mine")
    for length in range(1, 901):
        losses.played([sample(length)], None)
    losses.played([sample(2000 + i, Reason.ROLLOUT_TIMEOUT) for i in range(100)], None)
    report = losses.report()
    assert (report.environment, report.played, report.lost) == ("mine", 1000, 100)
    assert report.reasons == {"rollout_timeout": 100}
    assert report.shares == pytest.approx((0.0,) * 9 + (1.0,))
    assert bias(report.shares) == "0.0% of the shortest tenth of the rollouts, 100.0% of the longest"
    assert losses.metrics()["share"] == pytest.approx(0.1)
    assert losses.metrics()["tenth_10"] == pytest.approx(1.0)


def test_every_way_to_lose_a_rollout_counts_once() -> None:
    losses = Losses()
    assert losses.report().shares == ()
    kept, placeholder = sample(5), sample(7, Reason.CALL_FAILED)
    losses.played([kept, placeholder], None)
    losses.evicted([kept, placeholder])
    losses.played([sample(3), sample(4, Reason.NO_CALLS)], Reason.PROMPT_FAILED)
    losses.aborted(0)
    report = losses.report()
    assert (report.played, report.lost) == (5, 5)
    assert report.reasons == {"call_failed": 1, "evicted": 1, "prompt_failed": 1, "no_calls": 1, "aborted": 1}


@given(st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), min_size=1, max_size=60))
def test_the_tenths_add_up_to_what_is_lost(rollouts: list[tuple[int, bool]]) -> None:
    losses = Losses()
    for length, lost in rollouts:
        losses.played([sample(length, Reason.NO_CALLS if lost else None)], None)
    shares = losses.report().shares
    assert all(0 <= share <= 1 for share in shares)
    assert sum(shares) / DECILES * len(rollouts) == pytest.approx(sum(lost for _, lost in rollouts))


def test_each_failure_has_a_class_from_where_it_happened() -> None:
    assert {r.failure_class for r in Reason} == {"infra", "data", "capture"}
    assert Rejection(Reason.CALL_FAILED, "", CallFailure.CAPTURE_FAILED).failure_class == "capture"
    assert Rejection(Reason.CALL_FAILED, "", CallFailure.REFUSED).failure_class == "data"
    assert Rejection(Reason.CALL_FAILED, "", CallFailure.STAGING_FAILED).failure_class == "infra"
    assert Rejection(Reason.WRONG_DIGEST, "").failure_class == "capture"


def test_the_capture_alarm_is_raised_once_and_again_after_it_was_well() -> None:
    warnings: list[str] = []
    alarm = CaptureAlarm(FailuresConfig(capture_alarm_rate=0.1, capture_alarm_rollouts=40), warnings.append)
    for failed in [True] * 10 + [False] * 10:
        alarm.ended(failed=failed)
    assert warnings == []  # Too few to tell.
    for _ in range(15):
        alarm.ended(failed=False)
    assert len(warnings) == 1
    assert "custody failed for 10 of the last 32 rollouts" in warnings[0]
    for failed in [False] * 40 + [True] * 5:
        alarm.ended(failed=failed)
    assert len(warnings) == 2


def test_an_environment_may_fail_at_a_few_prompts_but_not_from_the_start() -> None:
    budget = EnvironmentBudget(FailuresConfig(max_failed=2))
    assert "no rollout was played" in budget.spend("it raised", refused=False)
    assert not budget.spend("it raised", refused=True)
    budget.played()
    assert not budget.spend("it raised", refused=False)
    assert "failures.max_failed 2 is used up" in budget.spend("it raised", refused=False)
    assert budget.failed == 2
