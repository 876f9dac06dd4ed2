"""Advantages: hand values, and the law that a masked sample never enters a baseline."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.advantages import EPS, Estimator, Group, coin_flips, step_advantages

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


def group_advantages(estimator: Estimator, rewards: Any, valid: Any, lengths: Any = None) -> Any:
    """Of a step with one group."""
    ones = np.ones(len(rewards), dtype=np.int64) if lengths is None else np.array(lengths)
    return step_advantages(estimator, [Group(rewards, valid, ones)])[0]


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
    # Weighted by length: (10 * 1 + 5 * 1) / (10 + 20 + 15 + 5) = 0.3; the placeholder's length does not count.
    lengths = [10, 20, 15, 5, 1000]
    assert group_advantages("opo", rewards, valid, lengths) == pytest.approx([0.7, -0.3, -0.3, 0.7, 0])


def test_hand_values_over_a_step() -> None:
    """Two groups, of whose four samples three are valid, one of them alone in its group."""
    true, ones = np.ones(2, dtype=bool), np.ones(2, dtype=np.int64)
    first = Group(np.array([1.0, 0.0]), true, ones)
    second = Group(np.array([3.0, 9.0]), np.array([True, False]), ones)
    over_all = np.array([1.0, 0.0, 3.0])
    scale = over_all.std(ddof=1) + EPS
    a, b = step_advantages("reinforce++", [first, second])
    assert a == pytest.approx((np.array([1.0, 0.0]) - 4 / 3) / scale)
    assert b == pytest.approx([(3 - 4 / 3) / scale, 0])
    # With the group's baseline the lone sample has none, and so is in no deviation either.
    a, b = step_advantages("reinforce++_baseline", [first, second])
    assert a == pytest.approx(np.array([0.5, -0.5]) / (np.sqrt(0.5) + EPS))
    assert not b.any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(step=st.lists(groups, min_size=1, max_size=4), junk=st.floats(-1e6, 1e6), length=st.integers(0, 10**6))
def test_a_placeholder_of_one_group_changes_nothing_in_the_whole_step(
    estimator: Estimator, step: list[list[tuple[float, bool]]], junk: float, length: int
) -> None:
    def advantages(junk: float, length: int) -> list[Any]:
        made: list[Group] = []
        for group in step:
            valid = np.array([v for _, v in group])
            rewards = np.where(valid, [r for r, _ in group], junk)
            made.append(Group(rewards, valid, np.where(valid, np.arange(1, len(group) + 1), length)))
        return step_advantages(estimator, made)

    for mine, altered, group in zip(advantages(0.0, 0), advantages(junk, length), step, strict=True):
        np.testing.assert_array_equal(mine, altered)
        assert not mine[[not v for _, v in group]].any()


def test_a_step_without_valid_samples_has_no_advantages() -> None:
    nothing = Group(np.array([1.0, 2.0]), np.zeros(2, dtype=bool), np.ones(2, dtype=np.int64))
    for estimator in ESTIMATORS:
        assert not step_advantages(estimator, [nothing])[0].any()
        assert step_advantages(estimator, []) == []


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


@pytest.mark.parametrize("estimator", [e for e in ESTIMATORS if e != "opo"])
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
