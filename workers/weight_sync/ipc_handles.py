"""CUDA IPC handles as plain lists: what torch needs to open a tensor of another process, without pickled classes.

A handle is the argument tuple of torch's `rebuild_cuda_tensor`; all of it is numbers and bytes but for two classes, which
are always the same, the dtype and the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_TENSOR_CLASS, _SIZE, _STRIDE, _STORAGE_CLASS, _DTYPE = 0, 1, 2, 4, 5


def plain(handle: Sequence[Any]) -> list[Any]:
    """The handle without classes."""
    values = list(handle)
    values[_TENSOR_CLASS] = values[_STORAGE_CLASS] = None
    values[_SIZE], values[_STRIDE] = list(values[_SIZE]), list(values[_STRIDE])
    values[_DTYPE] = str(values[_DTYPE]).removeprefix("torch.")
    return values


def rebuilt(values: Sequence[Any]) -> tuple[Any, ...]:
    """What `plain` was given. Raises ValueError for what it cannot have made."""
    import torch

    handle = list(values)
    dtype = getattr(torch, str(handle[_DTYPE]), None) if len(handle) > _DTYPE else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"an IPC handle of {len(handle)} values has no dtype among them")
    handle[_TENSOR_CLASS], handle[_STORAGE_CLASS], handle[_DTYPE] = torch.Tensor, torch.storage.TypedStorage, dtype
    handle[_SIZE], handle[_STRIDE] = torch.Size(handle[_SIZE]), tuple(handle[_STRIDE])
    return tuple(handle)
