"""What may be stored: the checks that every plane makes, so that all planes refuse the same rows with the same error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dataplane.errors import BadRow
from dataplane.plane import COLUMN_DTYPES, Column, Row

RESERVED_PREFIX = "__"
"""Column names that begin so belong to the planes."""

_ALLOWED = ", ".join(sorted(dtype.name for dtype in COLUMN_DTYPES))


def check_rows(partition: str, rows: Mapping[str, Row]) -> None:
    """Raise BadRow, naming the first row that cannot be stored and why.

    A row needs a key, and columns that are non-empty 1-D arrays of an allowed dtype; all rows of one put have the same
    columns. That a key is free, and that a column's dtype is the partition's, only the plane itself can tell.
    """
    first = next(iter(rows), "")
    shape = {name: getattr(column, "dtype", None) for name, column in rows[first].items()} if rows else {}
    for key, row in rows.items():
        problem = (
            _text_problem("the partition's name", partition)
            or _text_problem("the key", key)
            or _names_problem(row)
            or next(filter(None, map(_column_problem, row, row.values())), None)
        )
        if not problem and (own := {name: column.dtype for name, column in row.items()}) != shape:
            problem = f"has columns {_show(own)}, but row {first!r} of the same put has {_show(shape)}"
        if problem:
            raise BadRow(problem, partition=partition, keys=[key])


def dtype_problem(column: str, stored: str, offered: str) -> str:
    """Why a put is refused whose column differs in dtype from the partition's living rows."""
    return f"column {column!r} is {offered}, but this partition's rows hold it as {stored}"


def _show(columns: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({dtype})" for name, dtype in sorted(columns.items()))


def _text_problem(what: str, text: str) -> str | None:
    if not text:
        return f"{what} is empty"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{what} is not valid Unicode"
    return None


def _names_problem(names: Collection[str]) -> str | None:
    if not names:
        return "there are no columns"
    if reserved := sorted(name for name in names if not name or name.startswith(RESERVED_PREFIX)):
        return f"column names {reserved} are empty or begin with the reserved {RESERVED_PREFIX!r}"
    return None


def _column_problem(name: str, column: Column) -> str | None:
    # Typed callers cannot pass anything but an array; the others get an error that names the place.
    if not isinstance(column, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
        return f"column {name!r} is a {type(column).__name__}, not a numpy array"
    if column.dtype not in COLUMN_DTYPES:
        return f"column {name!r} has dtype {column.dtype}; allowed are {_ALLOWED}"
    if column.ndim != 1:
        return f"column {name!r} has shape {column.shape}; a column is 1-D"
    if not column.size:
        return f"column {name!r} is empty"
    return None
