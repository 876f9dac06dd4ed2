"""The torch engine's KV cache: one row per running request, rows of different lengths side by side.

It speaks the cache protocol of transformers, so a model's own forward reads and writes it. Rows in use are 0..n-1; the
memory grows by doubling to the longest request and the largest batch seen, and is never re-made per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass
class _Write:
    """Where the forward pass in progress writes: which rows, and either whole prompts or one token at `positions`."""

    rows: Tensor
    row_count: int
    """Rows to have memory for; all of `rows` are below."""
    positions: Tensor | None
    """[rows], None for prompts from position 0."""
    length: int
    """Positions 0..length-1 exist after the write."""


class KVCache(Cache):
    """Keys and values of up to `max_rows` requests of up to `max_tokens` tokens each."""

    def __init__(self, *, layers: int, max_rows: int, max_tokens: int, device: torch.device) -> None:
        self._slots = [_SlotLayer(max_rows, max_tokens) for _ in range(layers)]
        super().__init__(layers=[*self._slots])
        self._device = device

    def write_prompts(self, rows: Sequence[int], length: int, *, row_count: int) -> None:
        """The next forward pass is over prompts, right-padded to `length`: they fill `rows` from position 0.

        It makes memory for `row_count` rows, so that `copy_rows` may fill others than `rows`.
        """
        self._begin(_Write(torch.tensor(rows, device=self._device), row_count, None, length))

    def write_tokens(self, positions: Tensor, length: int) -> None:
        """The next forward pass is over one token for each of the first rows, at `positions` (the highest: length - 1)."""
        n = len(positions)
        self._begin(_Write(torch.arange(n, device=self._device), n, positions, length))

    def copy_rows(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the first `length` positions of each (source, target) pair of rows. All sources are read first."""
        source, target = (torch.tensor(side, device=self._device) for side in zip(*moves, strict=True))
        for layer in self._slots:
            for memory in (layer.keys, layer.values):
                if memory is not None:
                    memory[target, :, :length] = memory[source, :, :length]

    def _begin(self, write: _Write) -> None:
        for layer in self._slots:
            layer.write = write


class _SlotLayer(CacheLayerMixin):
    """One layer's memory: keys and values, each [rows, heads, tokens, head size]."""

    is_sliding = False

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        super().__init__()
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self.write: _Write | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new states; return all that the rows being written may attend to."""
        write = self.write
        assert write is not None, "the cache was not told where this forward pass writes"
        self.keys = keys = self._grown(self.keys, key_states, write)
        self.values = values = self._grown(self.values, value_states, write)
        if write.positions is None:
            keys[write.rows, :, : write.length] = key_states
            values[write.rows, :, : write.length] = value_states
            return key_states, value_states
        keys[write.rows, :, write.positions] = key_states[:, :, 0]
        values[write.rows, :, write.positions] = value_states[:, :, 0]
        return keys[: write.row_count, :, : write.length], values[: write.row_count, :, : write.length]

    def _grown(self, memory: Tensor | None, states: Tensor, write: _Write) -> Tensor:
        """`memory`, or a larger copy of it when it lacks rows or tokens. New memory is zero: masked, yet multiplied."""
        rows, tokens = (0, 0) if memory is None else (memory.shape[0], memory.shape[2])
        if memory is not None and rows >= write.row_count and tokens >= write.length:
            return memory
        grown = states.new_zeros(
            min(self._max_rows, _power_of_two(max(rows, write.row_count))),
            states.shape[1],
            min(self._max_tokens, _power_of_two(max(tokens, write.length, 64))),
            states.shape[3],
        )
        if memory is not None:
            grown[:rows, :, :tokens] = memory
        return grown

    # A pass over prompts looks to transformers like one with an empty cache; for a pass over single tokens it is given the
    # mask and asks nothing.
    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return self._max_tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the first write makes the memory."""


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
