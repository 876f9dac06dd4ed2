"""Rows of numpy columns to and from TransferQueue's batches of jagged torch columns.

Every batch carries an identity column: TransferQueue recycles its row numbers, so a row must be able to say whose it is, and
which columns were written with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict

from dataplane.errors import RowMismatch
from dataplane.plane import Column, Row
from dataplane.rows import RESERVED_PREFIX

ROW_ID = f"{RESERVED_PREFIX}row_id"
"""int64, per row: the row's identity, then that of each of its columns."""


def pack(partition: str, rows: Mapping[str, Row]) -> TensorDict:
    """A batch with one row per key, in their order, and the row identities. The rows must have passed `check_rows`.

    Columns are jagged: TransferQueue then stores every row on its own, while of a dense column one surviving row would
    keep the memory of the whole batch.
    """
    names = next(iter(rows.values()))
    columns = {name: _jagged([row[name] for row in rows.values()]) for name in names}
    own = [identity(name) for name in names]
    columns[ROW_ID] = _jagged([np.array([identity(partition, key), *own]) for key in rows])
    return TensorDict(cast("dict[str, Any]", columns), batch_size=len(rows))


def unpack(
    partition: str, keys: Sequence[str], columns: Sequence[str], batch: TensorDict, dtypes: Mapping[str, torch.dtype]
) -> list[dict[str, Column]]:
    """The rows of a batch, in the order of `keys`, each array with memory of its own.

    Raises RowMismatch unless the batch holds exactly these rows, with `columns` in `dtypes`, written together.
    """
    found = {name: _split(partition, keys, name, batch.get(name, None), dtypes[name]) for name in (*columns, ROW_ID)}
    identities = dict(zip(keys, (own.tolist() for own in found[ROW_ID]), strict=True))
    if wrong := [key for key, own in identities.items() if own[0] != identity(partition, key)]:
        raise RowMismatch("the plane returned another key's row", partition=partition, keys=wrong)
    wanted = {identity(name) for name in columns}
    if wrong := [key for key, own in identities.items() if not wanted.issubset(own[1:])]:
        raise RowMismatch("the plane returned another key's columns with the row's", partition=partition, keys=wrong)
    return [{name: found[name][i] for name in columns} for i in range(len(keys))]


def identity(*names: str) -> int:
    """64 bits that stand for a partition and key, or a column: BLAKE2b of the names, each behind its length."""
    digest = hashlib.blake2b(digest_size=8)
    for name in names:
        encoded = name.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return int.from_bytes(digest.digest(), "big", signed=True)


def _jagged(arrays: Sequence[Column]) -> torch.Tensor:
    values = torch.from_numpy(np.concatenate(arrays))
    rows: list[torch.Tensor] = list(cast("Any", values).split([len(array) for array in arrays]))
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _split(partition: str, keys: Sequence[str], name: str, column: Any, dtype: torch.dtype) -> list[Column]:
    if not isinstance(column, torch.Tensor) or not column.is_nested or column.layout != torch.jagged:
        raise RowMismatch(f"column {name!r} came back incomplete", partition=partition, keys=keys)
    if column.dtype != dtype or column.dim() != 2 or column.shape[0] != len(keys):
        found = f"{column.shape[0]} rows of {column.dim() - 1}-D {column.dtype}"
        expected = f"{len(keys)} rows of 1-D {dtype}"
        raise RowMismatch(f"column {name!r} came back as {found}, not {expected}", partition=partition, keys=keys)
    values: Column = column.values().numpy()
    bounds: list[int] = cast("Any", column).offsets().tolist()
    return [values[start:end].copy() for start, end in pairwise(bounds)]
