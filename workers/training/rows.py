"""Rows from the data plane, checked against what the controller announced, as the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dataplane.plane import Column, DataPlane
from dataplane.schema import ROUTED_EXPERTS, ROUTES_SHAPE, TRAIN_COLUMNS
from workers.training.errors import BadTrainRow

DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "input_ids": np.dtype(np.int64),
    "loss_mask": np.dtype(np.uint8),
    "rollout_logprobs": np.dtype(np.float32),
    "weight_versions": np.dtype(np.int64),
}


@dataclass(frozen=True)
class Batch:
    """B rows, right-padded to T, and their N loss tokens in row order. A loss token has loss_mask 1."""

    keys: tuple[str, ...]
    input_ids: Tensor
    """int64 [B, T]. Padding is token 0; causal attention never lets a real token see it."""
    row: Tensor
    """int64 [N]: the row of each loss token."""
    position: Tensor
    """int64 [N]: its position in the row, at least 1; it is predicted at `position - 1`."""
    row_tokens: Tensor
    """int64 [B]: loss tokens of each row."""
    rollout_logprobs: Tensor
    """float32 [N]: the sampler's."""
    weight_versions: Tensor
    """int64 [N]: the weights that each was sampled with."""
    routed_experts: Tensor | None = None
    """int32 [B, T, layers, topk]: the experts that the sampler used, -1 where unknown and in the padding."""

    @property
    def tokens(self) -> int:
        return self.row.shape[0]


async def fetch_rows(
    plane: DataPlane, partition: str, keys: Sequence[str], *, routes: bool = False
) -> list[dict[str, Column]]:
    """Read the train columns of each key, with `routes` the routed experts too. Raises the plane's errors; a cancellation
    leaves nothing."""
    return await plane.get(partition, keys, (*TRAIN_COLUMNS, ROUTED_EXPERTS, ROUTES_SHAPE) if routes else TRAIN_COLUMNS)


def collate(
    keys: Sequence[str],
    rows: Sequence[Mapping[str, Column]],
    *,
    vocab_size: int,
    device: torch.device,
    lengths: Sequence[int] | None = None,
    version: int | None = None,
) -> Batch:
    """Check the rows and pad them. `lengths` are the announced ones; no token can be of later weights than `version`.

    Raises BadTrainRow naming the key and what is wrong.
    """
    if not rows:
        raise BadTrainRow("there are no rows to train on")
    for i, (key, row) in enumerate(zip(keys, rows, strict=True)):
        _check(key, row, vocab_size, None if lengths is None else lengths[i], version)
    ids = np.zeros((len(rows), max(len(row["input_ids"]) for row in rows)), dtype=np.int64)
    mask = np.zeros(ids.shape, dtype=bool)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = row["input_ids"]
        mask[i, : len(row["loss_mask"])] = row["loss_mask"]
    row_index, position = np.nonzero(mask)
    logprobs, versions = (
        np.concatenate([row[name][row["loss_mask"] == 1] for row in rows])
        for name in ("rollout_logprobs", "weight_versions")
    )
    return Batch(
        keys=tuple(keys),
        input_ids=_tensor(ids, device),
        row=_tensor(row_index, device),
        position=_tensor(position, device),
        row_tokens=_tensor(mask.sum(1), device),
        rollout_logprobs=_tensor(logprobs, device),
        weight_versions=_tensor(versions, device),
        routed_experts=_routed_experts(keys, rows, ids.shape[1], device),
    )


def _routed_experts(
    keys: Sequence[str], rows: Sequence[Mapping[str, Column]], longest: int, device: torch.device
) -> Tensor | None:
    """int32, because NCCL has no int16. None where the rows have none."""
    if not any(ROUTED_EXPERTS in row for row in rows):
        return None
    shapes = {tuple(row[ROUTES_SHAPE].tolist()) if ROUTES_SHAPE in row else None for row in rows}
    shape = shapes.pop()
    if shapes or shape is None or len(shape) != 2 or min(shape) < 1:
        raise BadTrainRow(f"rows {list(keys)}: their routed experts have shapes {[*shapes, shape]}; all must have one")
    layers, topk = shape
    out = np.full((len(rows), longest, layers, topk), -1, dtype=np.int32)
    for i, (key, row) in enumerate(zip(keys, rows, strict=True)):
        column, tokens = row[ROUTED_EXPERTS], len(row["input_ids"])
        if column.dtype != np.int16 or column.shape != (tokens * layers * topk,):
            raise BadTrainRow(
                f"row {key!r}: routed_experts is {column.dtype} {column.shape}, not int16 ({tokens * layers * topk},)"
            )
        out[i, :tokens] = column.reshape(tokens, layers, topk)
    return _tensor(out, device)


def split(rows: Sequence[Mapping[str, Column]], max_tokens: int) -> Iterator[list[int]]:
    """Indices of rows that share a forward pass, longest first: at most `max_tokens` padded tokens, or one row."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]["input_ids"]))
    while order:
        fit = max(1, max_tokens // len(rows[order[0]]["input_ids"]))
        yield order[:fit]
        order = order[fit:]


def _tensor(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)  # pyright: ignore[reportUnknownMemberType]


def _check(key: str, row: Mapping[str, Column], vocab_size: int, length: int | None, version: int | None) -> None:
    def bad(what: str) -> BadTrainRow:
        return BadTrainRow(f"row {key!r}: {what}")

    for name, dtype in DTYPES.items():
        if row[name].dtype != dtype or row[name].ndim != 1:
            raise bad(f"{name} is {row[name].dtype} with {row[name].ndim} dimension(s), not 1-D {dtype}")
    lengths = {name: len(row[name]) for name in DTYPES}
    if len(set(lengths.values())) > 1:
        raise bad(f"its columns differ in length: {lengths}")
    if length is not None and lengths["input_ids"] != length:
        raise bad(f"it has {lengths['input_ids']} tokens, {length} were announced")
    ids, mask = row["input_ids"], row["loss_mask"]
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise bad(f"token ids go from {ids.min()} to {ids.max()}; the model has 0 to {vocab_size - 1}")
    if mask.max() > 1:
        raise bad(f"loss_mask holds {mask.max()}; it may hold 0 and 1")
    if mask[0]:
        raise bad("loss_mask marks the first token, which nothing predicts")
    newest = row["weight_versions"][mask == 1].max(initial=0)
    if version is not None and newest > version:
        raise bad(f"a token was sampled with weights {newest}, which are newer than the policy's {version}")
    if not np.isfinite(row["rollout_logprobs"][mask == 1]).all():
        raise bad("rollout_logprobs has a value that is not finite")
