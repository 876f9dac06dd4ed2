"""The DataPlane protocol: partitions of write-once rows, each a set of named ragged numeric columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Column: TypeAlias = npt.NDArray[Any]
Row: TypeAlias = Mapping[str, Column]
"""Column name to a non-empty 1-D array (int64, int32, int16, uint8 or float32). Scalars have length 1."""

COLUMN_DTYPES = frozenset(np.dtype(t) for t in ("int64", "int32", "int16", "uint8", "float32"))


class DataPlane(Protocol):
    """Keyed rows in partitions. All calls are native async; each has a deadline (`timeout`, seconds; None = the default).

    Cancellation: a put or clear that has started runs to its end before the cancellation is delivered (bounded by the
    deadline), so no key is left that is neither readable nor free. A cancelled get leaves nothing.
    Ordering: in one plane object, operations on one partition take effect in the order of the calls.
    """

    async def put(self, partition: str, rows: Mapping[str, Row], *, timeout: float | None = None) -> None:
        """Write rows, all or none: on an error no row of the call is left behind (unless the outcome is unknown).

        All rows of one call have the same columns, and a column has one dtype among the partition's rows. Raises BadRow,
        RowExists (naming the keys that are there), DataPlaneTimeout, DataPlaneDown. A put that ends after its deadline is
        undone: it can be tried again, and then waits for that.
        """
        ...

    async def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str], *, timeout: float | None = None
    ) -> list[dict[str, Column]]:
        """Read `columns` of each key, in the order of `keys`; the arrays are the caller's own copies.

        A key may be asked for more than once. Raises RowGone (naming the missing keys), RowMismatch (naming those that
        lack a column), DataPlaneTimeout("none"), DataPlaneDown.
        """
        ...

    async def clear(self, partition: str, keys: Collection[str], *, timeout: float | None = None) -> int:
        """Remove rows; keys without a row are ignored (idempotent). Returns how many rows were removed.

        Raises DataPlaneTimeout, DataPlaneDown; calling it again is always safe.
        """
        ...

    async def keys(self, partition: str, *, prefix: str = "", timeout: float | None = None) -> list[str]:
        """The partition's keys that begin with `prefix`, sorted. Costs O(rows in the partition): not for hot paths.

        Includes keys that are occupied but not readable, as a process leaves them that dies within a put: `clear` them.
        """
        ...

    def take_metrics(self) -> Mapping[str, float]:
        """What this client did since the last call, and how much is unsettled now, by name. For reports; may be empty."""
        ...

    async def aclose(self) -> None:
        """Release this client. The servers, and the rows, stay. Idempotent, bounded."""
        ...
