"""What each credit rule makes of a token's factor in the step's loss."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.credit import Aggregation, Credit, row_weights

LONGEST = 64
"""The constant length of `sequence_sum`."""
ROLLOUTS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=5), min_size=1, max_size=6)
AGGREGATIONS = st.sampled_from(get_args(Aggregation))


def factors(credit: Credit, aggregation: Aggregation, rollouts: list[list[int]]) -> list[list[float]]:
    """Each row's factor per token in the step's loss: its weight times the trainer's normaliser."""
    tokens, rows = sum(map(sum, rollouts)), sum(map(len, rollouts))
    normaliser = {
        "token_mean": lambda n: 1 / tokens,
        "sequence_mean": lambda n: 1 / (rows * n),
        "sequence_sum": lambda n: 1 / (rows * LONGEST),
    }[aggregation]
    weights = row_weights(credit, aggregation, rollouts)
    return [[w * normaliser(n) for w, n in zip(*pair, strict=True)] for pair in zip(weights, rollouts, strict=True)]


def shares(credit: Credit, aggregation: Aggregation, rollouts: list[list[int]]) -> list[float]:
    """Each rollout's factors, summed over its tokens."""
    rows = factors(credit, aggregation, rollouts)
    return [sum(f * n for f, n in zip(*pair, strict=True)) for pair in zip(rows, rollouts, strict=True)]


@given(st.sampled_from(get_args(Credit)), AGGREGATIONS, st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_rollouts_with_one_row_each_have_weight_one_under_every_rule(credit, aggregation, lengths):
    assert row_weights(credit, aggregation, [[n] for n in lengths]) == [[1.0] for _ in lengths]


@given(ROLLOUTS)
def test_under_equal_and_per_token_a_rollout_is_one_sequence_however_many_rows_it_has(rollouts):
    for credit in ("equal", "per_token"):
        assert shares(credit, "sequence_mean", rollouts) == pytest.approx([1 / len(rollouts)] * len(rollouts))


@given(ROLLOUTS)
def test_under_equal_a_rollout_weighs_as_one_of_its_mean_row(rollouts):
    means = [sum(counts) / len(counts) for counts in rollouts]
    assert shares("equal", "token_mean", rollouts) == pytest.approx([m / sum(means) for m in means])
    assert shares("equal", "sequence_sum", rollouts) == pytest.approx([m / len(rollouts) / LONGEST for m in means])


@given(ROLLOUTS, AGGREGATIONS)
def test_under_equal_the_rows_of_a_rollout_share_evenly(rollouts, aggregation):
    for counts, weights in zip(rollouts, row_weights("equal", aggregation, rollouts), strict=True):
        assert len(set(weights)) == 1
        assert len(weights) == len(counts)


@given(ROLLOUTS, AGGREGATIONS)
def test_under_per_token_a_rollout_weighs_as_one_row_that_holds_all_of_its_tokens(rollouts, aggregation):
    joined = [[sum(counts)] for counts in rollouts]
    assert shares("per_token", aggregation, rollouts) == pytest.approx(shares("per_token", aggregation, joined))
    for row in factors("per_token", aggregation, rollouts):
        assert row == pytest.approx([row[0]] * len(row)), "all tokens of a rollout weigh the same"


@given(ROLLOUTS, AGGREGATIONS)
def test_under_per_branch_every_row_is_a_rollout_of_its_own(rollouts, aggregation):
    apart = [[n] for counts in rollouts for n in counts]
    together = [f for row in factors("per_branch", aggregation, rollouts) for f in row]
    assert together == pytest.approx([f for row in factors("per_branch", aggregation, apart) for f in row])


@given(st.sampled_from(["equal", "per_token"]), ROLLOUTS)
def test_the_factors_of_a_mean_add_up_to_one(credit, rollouts):
    for aggregation in ("token_mean", "sequence_mean"):
        assert math.isclose(sum(shares(credit, aggregation, rollouts)), 1.0)
