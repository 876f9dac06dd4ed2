"""Sampling against the textbook filters, for any logits and settings."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ledger.records import Sampling
from tests.workers.generation.helpers import distribution
from workers.generation.sampling import SamplingBatch, sample

settings = st.builds(
    Sampling,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 12, 50]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-9]),
)
# Multiples of 1/8 give ties, which top-k has to break.
logits_rows = st.lists(st.integers(-80, 80).map(lambda i: i / 8), min_size=12, max_size=12)


def draw(logits: Any, rows: list[Sampling], uniforms: Any) -> tuple[list[int], list[float]]:
    batch = SamplingBatch.of(rows, 12, torch.device("cpu"))
    tokens, logprobs = sample(torch.tensor(logits), batch, torch.tensor(uniforms, dtype=torch.float64))
    return tokens.tolist(), logprobs.tolist()


@given(st.lists(st.tuples(logits_rows, settings, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=6))
def test_each_row_is_drawn_by_inverse_cdf_from_its_own_distribution(
    rows: list[tuple[list[float], Sampling, float]],
) -> None:
    tokens, logprobs = draw([r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows])
    for (logits, sampling, u), token, logprob in zip(rows, tokens, logprobs, strict=True):
        expected = distribution(np.array(logits) / (sampling.temperature or 1), sampling)
        assert logprob == pytest.approx(expected[token], abs=1e-9)
        if sampling.temperature == 0:
            assert token == int(np.argmax(logits))
        else:
            cdf = np.cumsum(np.exp(expected))
            assert (cdf[token - 1] if token else 0) - 1e-9 <= u <= cdf[token] + 1e-9
        alone = draw([logits], [sampling], [u])
        assert alone == ([token], [logprob])


def test_the_largest_uniform_number_draws_a_token_that_has_mass() -> None:
    below_one = math.nextafter(1, 0)
    for sampling in (Sampling(max_tokens=1), Sampling(max_tokens=1, top_k=3)):
        logits = [0.1, 3.0, 0.2, 2.0, 1.0, *[-800.0] * 7]
        tokens, logprobs = draw([logits], [sampling], [below_one])
        assert tokens == [4]
        assert math.isfinite(logprobs[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_show_in_the_logprob(bad: float) -> None:
    for sampling in (Sampling(max_tokens=1), Sampling(max_tokens=1, top_k=3), Sampling(max_tokens=1, temperature=0)):
        tokens, logprobs = draw([[bad] + [0.0] * 11], [sampling], [0.5])
        assert 0 <= tokens[0] < 12
        assert not math.isfinite(logprobs[0])
