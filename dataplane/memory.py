"""A data plane in this process's memory: the model that defines what every plane must do, and a plane for tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from anyio.lowlevel import checkpoint

from dataplane.errors import BadRow, DataPlaneDown, RowExists, RowGone, RowMismatch
from dataplane.plane import Column, Row
from dataplane.rows import check_rows, dtype_problem


class MemoryPlane:
    """A `DataPlane` whose every call takes effect at once, or, when cancelled, not at all. It never times out."""

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, dict[str, Column]]] = {}
        self._closed = False

    async def put(self, partition: str, rows: Mapping[str, Row], *, timeout: float | None = None) -> None:
        await self._enter()
        check_rows(partition, rows)
        stored = self._partitions.setdefault(partition, {})
        if present := [key for key in rows if key in stored]:
            raise RowExists("a row is written once", partition=partition, keys=present)
        self._check_dtypes(partition, rows, stored)
        stored.update({key: {name: column.copy() for name, column in row.items()} for key, row in rows.items()})

    async def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str], *, timeout: float | None = None
    ) -> list[dict[str, Column]]:
        await self._enter()
        stored = self._partitions.get(partition, {})
        unique = dict.fromkeys(keys)
        if gone := [key for key in unique if key not in stored]:
            raise RowGone("no such row", partition=partition, keys=gone)
        if lacking := [key for key in unique if not set(columns) <= set(stored[key])]:
            raise RowMismatch(f"not all of the columns {list(columns)} are there", partition=partition, keys=lacking)
        return [{name: stored[key][name].copy() for name in columns} for key in keys]

    async def clear(self, partition: str, keys: Collection[str], *, timeout: float | None = None) -> int:
        await self._enter()
        stored = self._partitions.get(partition, {})
        return sum(stored.pop(key, None) is not None for key in keys)

    async def keys(self, partition: str, *, prefix: str = "", timeout: float | None = None) -> list[str]:
        await self._enter()
        return sorted(key for key in self._partitions.get(partition, {}) if key.startswith(prefix))

    def take_metrics(self) -> dict[str, float]:
        return {}

    async def aclose(self) -> None:
        self._closed = True

    async def _enter(self) -> None:
        """The one place where a call can be cancelled: before it has done anything."""
        await checkpoint()
        if self._closed:
            raise DataPlaneDown("this plane was closed")

    def _check_dtypes(
        self, partition: str, rows: Mapping[str, Row], stored: Mapping[str, Mapping[str, Column]]
    ) -> None:
        for row in list(rows.values())[:1]:
            for name, column in row.items():
                held = next((r[name].dtype for r in stored.values() if name in r), column.dtype)
                if held != column.dtype:
                    problem = dtype_problem(name, held.name, column.dtype.name)
                    raise BadRow(problem, partition=partition, keys=list(rows))
