"""Logprobs and entropies, and their gradients, against plain autograd."""

from __future__ import annotations

import math

import pytest
import torch

from workers.training import logprobs as module
from workers.training.logprobs import token_logprobs


def plain(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    every = (logits / temperature).log_softmax(-1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("block", [1, 20, 1 << 22])
def test_values_and_gradients_are_those_of_plain_autograd(
    temperature: float, block: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", block)
    torch.manual_seed(0)
    logits = (3 * torch.randn(7, 11, dtype=torch.float64)).requires_grad_()
    targets, factors = torch.randint(11, (7,)), torch.randn(2, 7, dtype=torch.float64)
    for used in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
        ours, theirs = token_logprobs(logits, targets, temperature), plain(logits, targets, temperature)
        for got, want in zip(ours, theirs, strict=True):
            assert torch.allclose(got, want, rtol=1e-13, atol=1e-13)
        got, want = (
            torch.autograd.grad(sum(u * (f * x).sum() for u, f, x in zip(used, factors, pair, strict=True)), logits)[0]
            for pair in (ours, theirs)
        )
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-13)


def test_gradients_agree_with_finite_differences():
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, 2, 2])
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, targets, 0.8), (logits,))


def test_half_precision_logits_get_a_float32_softmax_and_a_gradient_of_their_own_type():
    logits = torch.randn(3, 50).bfloat16().requires_grad_()
    logprobs, entropies = token_logprobs(logits, torch.tensor([1, 2, 3]), 1.0)
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert torch.allclose(logprobs, plain(logits.float(), torch.tensor([1, 2, 3]), 1.0)[0], atol=1e-6)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_forbidden_tokens_do_not_spoil_the_others():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    logprobs, entropies = token_logprobs(logits, torch.tensor([0]), 1.0)
    assert logprobs.item() == pytest.approx(-math.log(2))
    assert entropies.item() == pytest.approx(math.log(2))
    (logprobs + entropies).sum().backward()
    assert logits.grad is not None
    assert torch.allclose(logits.grad, torch.tensor([[0.5, -0.5, 0.0]]), atol=1e-6)


def test_large_logits_do_not_overflow():
    logprobs, entropies = token_logprobs(torch.tensor([[1e4, 0.0], [-1e4, 1e4]]), torch.tensor([0, 0]), 1.0)
    assert logprobs.tolist() == [0.0, -2e4]
    assert entropies.tolist() == [0.0, 0.0]


def test_no_tokens_are_allowed():
    logits = torch.zeros(0, 5, requires_grad=True)
    logprobs, entropies = token_logprobs(logits, torch.zeros(0, dtype=torch.int64), 1.0)
    (logprobs.sum() + entropies.sum()).backward()
    assert logprobs.shape == entropies.shape == (0,)
