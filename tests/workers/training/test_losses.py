"""Every term of the loss against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.training.losses import Aggregation, importance_weights, kl_divergence, policy_loss, token_weights


def clipped(ratio: float, advantage: float) -> tuple[float, float, bool]:
    """Loss, d loss / d logprob, and whether clipping took the gradient away."""
    logprob = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    result = policy_loss(logprob, old, advantages, clip_low=0.2, clip_high=0.28)
    (grad,) = torch.autograd.grad(result.loss.sum(), logprob)
    assert result.ratio.item() == pytest.approx(ratio)
    return result.loss.item(), grad.item(), bool(result.clipped.item())


def test_inside_the_bounds_the_gradient_is_ratio_times_advantage():
    assert clipped(1.1, 2.0) == (pytest.approx(-2.2), pytest.approx(-2.2), False)
    assert clipped(0.9, -2.0) == (pytest.approx(1.8), pytest.approx(1.8), False)


def test_a_good_token_is_not_pushed_above_the_upper_bound():
    assert clipped(1.5, 2.0) == (pytest.approx(-2.56), 0.0, True)


def test_a_bad_token_is_not_pushed_below_the_lower_bound():
    assert clipped(0.5, -2.0) == (pytest.approx(1.6), 0.0, True)


def test_clipping_never_stops_a_move_back_towards_the_old_policy():
    assert clipped(0.5, 2.0) == (pytest.approx(-1.0), pytest.approx(-1.0), False)
    assert clipped(1.5, -2.0) == (pytest.approx(3.0), pytest.approx(3.0), False)


def test_the_two_bounds_are_separate():
    assert clipped(1.27, 1.0)[2] is False
    assert clipped(1.29, 1.0)[2] is True
    assert clipped(0.81, -1.0)[2] is False
    assert clipped(0.79, -1.0)[2] is True


def test_a_token_without_advantage_has_neither_loss_nor_gradient_nor_clipping():
    loss, gradient, is_clipped = clipped(3.0, 0.0)
    assert abs(loss) == 0.0
    assert abs(gradient) == 0.0
    assert not is_clipped


@pytest.mark.parametrize("log_ratio", [-200.0, 200.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_absurd_ratios_keep_loss_and_gradient_finite(log_ratio: float, advantage: float):
    logprob = torch.tensor([log_ratio], requires_grad=True)
    result = policy_loss(logprob, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28)
    (grad,) = torch.autograd.grad(result.loss.sum(), logprob)
    assert result.loss.isfinite().all()
    assert grad.isfinite().all()


def test_importance_weights_are_the_ratio_truncated_above_only():
    policy, rollout = torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.5, -4.0, -1.0])
    assert importance_weights(policy, rollout, 2.0).tolist() == pytest.approx([math.exp(0.5), 2.0, math.exp(-2.0)])


def test_importance_weights_carry_no_gradient():
    assert not importance_weights(torch.zeros(2, requires_grad=True), torch.zeros(2), 2.0).requires_grad


def test_kl_estimators_have_their_published_values():
    logprobs, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl_divergence(logprobs, reference, "k1").tolist() == pytest.approx([0.5, -1.0])
    assert kl_divergence(logprobs, reference, "k2").tolist() == pytest.approx([0.125, 0.5])
    assert kl_divergence(logprobs, reference, "k3").tolist() == pytest.approx(
        [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0]
    )


def test_k1_and_k3_are_unbiased_and_k2_has_the_gradient_of_the_kl():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    logp, logq = logits.log_softmax(0), torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64).log_softmax(0)
    p = logp.exp()
    exact = (p * (logp - logq)).sum()
    for estimator in ("k1", "k3"):
        expectation = (p * kl_divergence(logp, logq, estimator)).sum()
        assert expectation.item() == pytest.approx(exact.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad((p.detach() * kl_divergence(logp, logq, "k2")).sum(), logits)
    assert torch.allclose(gradient, of_k2, rtol=1e-12)


def test_token_weights_by_hand():
    row, row_tokens = torch.tensor([0, 0, 0, 1]), torch.tensor([3, 1])
    expected: dict[Aggregation, list[float]] = {
        "token_mean": [1 / 10] * 4,
        "sequence_mean": [1 / 12, 1 / 12, 1 / 12, 1 / 4],
        "sequence_sum": [1 / 80] * 4,
    }
    for aggregation, weights in expected.items():
        got = token_weights(
            aggregation, row, row_tokens, loss_tokens=10, sequences=4, max_tokens=20, dtype=torch.float64
        )
        assert got.tolist() == pytest.approx(weights)


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8), cut=st.integers(0, 8))
def test_weights_do_not_depend_on_the_split(lengths: list[int], cut: int):
    def of(part: list[int], aggregation: Aggregation) -> torch.Tensor:
        counts = torch.tensor(part, dtype=torch.int64)
        row = torch.repeat_interleave(torch.arange(len(part)), counts)
        return token_weights(
            aggregation,
            row,
            counts,
            loss_tokens=max(1, sum(lengths)),
            sequences=len(lengths),
            max_tokens=9,
            dtype=torch.float64,
        )

    aggregations: list[Aggregation] = ["token_mean", "sequence_mean", "sequence_sum"]
    for aggregation in aggregations:
        parts = torch.cat([of(lengths[:cut], aggregation), of(lengths[cut:], aggregation)])
        assert torch.equal(of(lengths, aggregation), parts)
