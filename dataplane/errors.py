"""The data plane's error tree. Each error carries what a handler needs to act on it.

DataPlaneError
├── RowExists        put of a key that is there already (rows are written once)
├── RowGone          get of a key that was cleared or never written
├── RowMismatch      what came back is not what was asked for (identity, count, columns, dtype)
├── BadRow           the caller's rows cannot be stored (empty, wrong shape or dtype, duplicate key)
├── DataPlaneTimeout no answer within the deadline; `outcome` says whether the operation may still take effect
└── DataPlaneDown    the servers are gone, or the plane was closed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast


class DataPlaneError(Exception):
    """Base of all data-plane errors."""


class _KeyedError(DataPlaneError):
    def __init__(self, message: str, *, partition: str, keys: Sequence[str]) -> None:
        shown = ", ".join(repr(k) for k in keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        super().__init__(f"partition {partition!r}, key(s) {shown}: {message}")
        self.partition = partition
        self.keys = tuple(keys)


class RowExists(_KeyedError):
    """A put named a key that already has a row; rows are written once."""


class RowGone(_KeyedError):
    """A get named a key that has no row (cleared, or never written)."""


class RowMismatch(_KeyedError):
    """The plane returned something other than what was asked for."""


class BadRow(_KeyedError):
    """The caller's rows cannot be stored as they are."""


class DataPlaneTimeout(DataPlaneError):
    """No answer within the deadline.

    `outcome` is "none" when nothing was changed (a get, or a write that had not begun or was taken back), "unknown" when
    the operation may still take effect.
    """

    def __init__(self, operation: str, *, partition: str, seconds: float, outcome: Literal["none", "unknown"]) -> None:
        super().__init__(
            f"{operation} on partition {partition!r}: no answer within {seconds:g} s (outcome: {outcome}); "
            "is the data plane's server alive and not overloaded?"
        )
        self.operation = operation
        self.partition = partition
        self.seconds = seconds
        self.outcome = outcome


class DataPlaneDown(DataPlaneError):
    """The data plane's servers are gone, or this plane was closed."""


def first_error(error: BaseException) -> BaseException:
    """Of the errors in a group the one that happened first."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseException", error.exceptions[0])
    return error
