"""A column of a batch: the 1-D arrays of many rows, of unequal lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch

from dataplane.plane import Column


@dataclass(frozen=True)
class Ragged:
    rows: Sequence[torch.Tensor]

    @classmethod
    def of(cls, arrays: Sequence[Column]) -> Ragged:
        """Views of the arrays; copies of those that torch cannot view."""
        return cls([torch.from_numpy(np.require(array, requirements=["C", "W"])) for array in arrays])

    @property
    def dtype(self) -> torch.dtype:
        return self.rows[0].dtype

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    def joined(self) -> tuple[torch.Tensor, list[int]]:
        """A copy of the rows, one behind the other, and where each begins; the last bound is the end."""
        return torch.cat(list(self.rows)), [0, *accumulate(self.lengths)]


Batch: TypeAlias = Mapping[str, Ragged]
"""The columns of a put."""


def schema_of(batch: Batch) -> dict[str, dict[str, Any]]:
    """What TransferQueue's controller is told of a batch: what its `extract_field_schema` says of jagged tensors."""
    return {
        name: {
            "dtype": column.dtype,
            "shape": column.rows[0].shape,
            "is_nested": True,
            "is_non_tensor": False,
            "per_sample_shapes": [(length,) for length in column.lengths],
        }
        for name, column in batch.items()
    }
