"""A column of a batch: the 1-D arrays of many rows, of unequal lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from dataplane.plane import Column


@dataclass(frozen=True)
class Ragged:
    """The values of all rows behind each other, and where each row begins; the last bound is the end."""

    values: torch.Tensor
    bounds: Sequence[int]

    @classmethod
    def joined(cls, arrays: Sequence[Column]) -> Ragged:
        """A copy of the arrays."""
        return cls(torch.from_numpy(np.concatenate(arrays)), [0, *accumulate(map(len, arrays))])

    @property
    def lengths(self) -> list[int]:
        return [end - begin for begin, end in pairwise(self.bounds)]

    def rows(self) -> list[torch.Tensor]:
        """One view for each row."""
        return list(cast("Any", self.values).split(self.lengths))


Batch: TypeAlias = Mapping[str, Ragged]
"""The columns of a put."""


def schema_of(batch: Batch) -> dict[str, dict[str, Any]]:
    """What TransferQueue's controller is told of a batch: what its `extract_field_schema` says of jagged tensors."""
    return {
        name: {
            "dtype": column.values.dtype,
            "shape": torch.Size([column.bounds[1]]),
            "is_nested": True,
            "is_non_tensor": False,
            "per_sample_shapes": [(length,) for length in column.lengths],
        }
        for name, column in batch.items()
    }
