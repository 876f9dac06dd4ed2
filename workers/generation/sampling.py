"""Draws one token per row from float64 distributions, by inverse CDF, and says the log-probability it drew with.

A row's token depends on that row's logits, settings and uniform number only, whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ledger.records import Sampling


def check(sampling: Sampling, vocab_size: int) -> None:
    """Raise ValueError for settings that define no distribution."""
    s = sampling
    for name, value, fine, allowed in (
        ("max_tokens", s.max_tokens, s.max_tokens >= 1, "1 or more"),
        ("temperature", s.temperature, 0 <= s.temperature < math.inf, "finite, 0 (greedy) or more"),
        ("top_p", s.top_p, 0 < s.top_p <= 1, "more than 0, at most 1 (off)"),
        ("top_k", s.top_k, s.top_k >= 0, "0 (off) or more"),
        (
            "stop_token_ids",
            s.stop_token_ids,
            all(0 <= t < vocab_size for t in s.stop_token_ids),
            f"0 to {vocab_size - 1}",
        ),
        ("stop", s.stop, all(s.stop), "texts of at least one character"),
    ):
        if not fine:
            raise ValueError(f"sampling.{name} is {value!r}; allowed: {allowed}")


@dataclass(frozen=True)
class SamplingBatch:
    """The rows' settings as tensors, each [rows]; built once per change of membership."""

    temperature: Tensor
    """float64; 1 for greedy rows."""
    greedy: Tensor
    filtered: Tensor
    """Indices of the rows with top-k or top-p."""
    top_k: Tensor
    """Of the filtered rows."""
    top_p: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sampling], vocab_size: int, device: torch.device) -> SamplingBatch:
        filtered = [i for i, s in enumerate(rows) if s.temperature > 0 and (s.top_p < 1 or 0 < s.top_k < vocab_size)]
        return cls(
            temperature=torch.tensor([s.temperature or 1.0 for s in rows], dtype=torch.float64, device=device),
            greedy=torch.tensor([s.temperature == 0 for s in rows], device=device),
            filtered=torch.tensor(filtered, dtype=torch.long, device=device),
            top_k=torch.tensor([rows[i].top_k or vocab_size for i in filtered], device=device),
            top_p=torch.tensor([rows[i].top_p for i in filtered], dtype=torch.float64, device=device),
        )


def sample(logits: Tensor, batch: SamplingBatch, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token for each row of `logits` [rows, vocab].

    `uniforms` [rows], float64 in [0, 1). Temperature is applied first, then top-k, then top-p to what top-k left.
    Returns token ids (int64) and their natural logprobs (float64) under the distribution drawn from; a greedy row gives the
    argmax and its logprob at temperature 1. Logits that are not finite give a logprob that is not finite, never an error.
    """
    scaled = logits.double() / batch.temperature[:, None]
    if len(batch.filtered):
        scaled[batch.filtered] = _filter(scaled[batch.filtered], batch.top_k, batch.top_p)
    scaled -= scaled.amax(-1, keepdim=True)
    cdf = scaled.exp().cumsum(-1)
    total = cdf[:, -1:].contiguous()
    drawn = torch.searchsorted(cdf, uniforms[:, None] * total, right=True)
    # Rounding can carry u * total up to the total itself; the last token with any mass is then meant.
    drawn = torch.minimum(drawn, torch.searchsorted(cdf, total))
    drawn = torch.where(batch.greedy[:, None], scaled.argmax(-1, keepdim=True), drawn).clamp_(max=logits.shape[-1] - 1)
    return drawn[:, 0], (scaled.gather(-1, drawn) - total.log())[:, 0]


def _filter(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set the logits that top-k and top-p exclude to -inf. Of equal logits the lower token id ranks first.

    Top-p (nucleus sampling, Holtzman et al. 2020) keeps the fewest tokens whose probability reaches `top_p`.
    """
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], -math.inf)
    probs = ordered.softmax(-1)
    ordered = ordered.masked_fill(probs.cumsum(-1) - probs >= top_p[:, None], -math.inf)
    return torch.empty_like(scaled).scatter_(-1, index, ordered)
