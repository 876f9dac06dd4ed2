"""Rows of numpy columns to and from batches of torch columns, as a `Store` takes and gives them.

Every batch carries an identity column: TransferQueue recycles its row numbers, so a row must be able to say whose it is, and
which columns were written with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dataplane.errors import RowMismatch
from dataplane.plane import Column, Row
from dataplane.ragged import Batch, Ragged
from dataplane.rows import RESERVED_PREFIX

ROW_ID = f"{RESERVED_PREFIX}row_id"
"""int64, per row: the row's identity, then that of each of its columns."""


def pack(partition: str, rows: Mapping[str, Row]) -> Batch:
    """A batch with one row per key, in their order, and the row identities. The rows must have passed `check_rows`."""
    names = next(iter(rows.values()))
    own = [identity(name) for name in names]
    return {name: Ragged.of([row[name] for row in rows.values()]) for name in names} | {
        ROW_ID: Ragged.of([np.array([identity(partition, key), *own]) for key in rows])
    }


def unpack(
    partition: str,
    keys: Sequence[str],
    columns: Sequence[str],
    found: Mapping[str, Sequence[Any]],
    dtypes: Mapping[str, torch.dtype],
) -> list[dict[str, Column]]:
    """The found rows, in the order of `keys`, each array with memory of its own.

    Raises RowMismatch unless exactly these rows were found, with `columns` in `dtypes`, written together.
    """
    whole = {name: _arrays(partition, keys, name, found[name], dtypes[name]) for name in (*columns, ROW_ID)}
    identities = dict(zip(keys, (own.tolist() for own in whole[ROW_ID]), strict=True))
    if wrong := [key for key, own in identities.items() if own[0] != identity(partition, key)]:
        raise RowMismatch("the plane returned another key's row", partition=partition, keys=wrong)
    wanted = {identity(name) for name in columns}
    if wrong := [key for key, own in identities.items() if not wanted.issubset(own[1:])]:
        raise RowMismatch("the plane returned another key's columns with the row's", partition=partition, keys=wrong)
    return [{name: whole[name][i] for name in columns} for i in range(len(keys))]


def identity(*names: str) -> int:
    """64 bits that stand for a partition and key, or a column: BLAKE2b of the names, each behind its length."""
    digest = hashlib.blake2b(digest_size=8)
    for name in names:
        encoded = name.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return int.from_bytes(digest.digest(), "big", signed=True)


def _arrays(partition: str, keys: Sequence[str], name: str, rows: Sequence[Any], dtype: torch.dtype) -> list[Column]:
    if len(rows) != len(keys):
        raise RowMismatch(f"of column {name!r} {len(rows)} rows came back", partition=partition, keys=keys)
    for key, row in zip(keys, rows, strict=True):
        if not isinstance(row, torch.Tensor) or row.dtype != dtype or row.dim() != 1:
            shown = f"{row.dim()}-D {row.dtype}" if isinstance(row, torch.Tensor) else f"a {type(row).__name__}"
            raise RowMismatch(f"column {name!r} came back as {shown}, not 1-D {dtype}", partition=partition, keys=[key])
    return [row.numpy().copy() for row in rows]
