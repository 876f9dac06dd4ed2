"""Advantages: hand values, and the law that a masked sample never enters a baseline."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.advantages import EPS, Estimator, coin_flips, group_advantages

ESTIMATORS: list[Estimator] = ["grpo", "dr_grpo", "rloo"]
groups = st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=12)


def test_hand_values() -> None:
    rewards, valid = np.array([1.0, 0.0, 0.0, 1.0, 9.0]), np.array([True, True, True, True, False])
    std = np.sqrt(1 / 3)
    assert group_advantages("grpo", rewards, valid) == pytest.approx(
        [0.5 / (std + EPS), -0.5 / (std + EPS), -0.5 / (std + EPS), 0.5 / (std + EPS), 0]
    )
    assert group_advantages("dr_grpo", rewards, valid) == pytest.approx([0.5, -0.5, -0.5, 0.5, 0])
    # Leave-one-out: 1 - mean(0, 0, 1) = 2/3, 0 - mean(1, 0, 1) = -2/3.
    assert group_advantages("rloo", rewards, valid) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3, 0])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(group=groups, junk=st.floats(-1e6, 1e6))
def test_a_masked_reward_changes_nothing_and_gets_nothing(
    estimator: Estimator, group: list[tuple[float, bool]], junk: float
) -> None:
    rewards, valid = np.array([r for r, _ in group]), np.array([v for _, v in group])
    advantages = group_advantages(estimator, rewards, valid)
    altered = np.where(valid, rewards, junk)
    np.testing.assert_array_equal(advantages, group_advantages(estimator, altered, valid))
    assert not advantages[~valid].any()
    if valid.sum() > 1:
        np.testing.assert_allclose(advantages[valid], group_advantages(estimator, rewards[valid], valid[valid]))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rewards=st.lists(st.floats(-5, 5), min_size=2, max_size=12))
def test_advantages_sum_to_zero_and_follow_the_order_of_rewards(estimator: Estimator, rewards: list[float]) -> None:
    r = np.array(rewards)
    a = group_advantages(estimator, r, np.ones(len(r), dtype=bool))
    assert a.sum() == pytest.approx(0, abs=1e-6 / EPS)
    order = np.argsort(r, kind="stable")
    assert (np.diff(a[order]) >= -1e-9).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_valid_sample_has_no_baseline(estimator: Estimator) -> None:
    assert not group_advantages(estimator, np.array([1.0, 0.0]), np.array([True, False])).any()


def test_shapes_must_match() -> None:
    with pytest.raises(ValueError, match="1-D and of equal length"):
        group_advantages("grpo", np.zeros(3), np.ones(2, dtype=bool))


def test_coin_flips_are_fair_and_follow_from_seed_and_group_alone() -> None:
    flips = np.concatenate([coin_flips(seed, f"g{i}", 8) for seed in range(5) for i in range(100)])
    assert set(flips) == {0.0, 1.0}
    assert abs(flips.mean() - 0.5) < 0.05
    np.testing.assert_array_equal(coin_flips(1, "g7", 8), coin_flips(1, "g7", 8))
    assert len({tuple(coin_flips(seed, group, 32)) for seed in (0, 1) for group in ("g0", "g1")}) == 4
