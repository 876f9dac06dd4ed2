"""Data planes that fail as the real one does: late, down, with other rows than were asked for, or only for some keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from dataplane.errors import DataPlaneTimeout, RowMismatch
from dataplane.memory import MemoryPlane
from dataplane.plane import Column, Row


class FaultyPlane(MemoryPlane):
    """`fail` is asked before each operation with its name, partition and keys, and raises what it is to fail with.

    `bad` keys cannot be read: any read that has one of them among its keys fails, naming no one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fail: Callable[[str, str, Sequence[str]], None] = lambda *_: None
        self.bad: set[str] = set()
        self.gets: list[list[str]] = []

    async def put(self, partition: str, rows: Mapping[str, Row], *, timeout: float | None = None) -> None:
        self.fail("put", partition, list(rows))
        await super().put(partition, rows)

    async def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str], *, timeout: float | None = None
    ) -> list[dict[str, Column]]:
        self.gets.append(list(keys))
        self.fail("get", partition, keys)
        if self.bad & set(keys):
            raise RowMismatch("the plane returned another key's row", partition=partition, keys=list(keys))
        return await super().get(partition, keys, columns)

    async def clear(self, partition: str, keys: Collection[str], *, timeout: float | None = None) -> int:
        self.fail("clear", partition, list(keys))
        return await super().clear(partition, keys)

    async def keys(self, partition: str, *, prefix: str = "", timeout: float | None = None) -> list[str]:
        self.fail("keys", partition, [prefix])
        return await super().keys(partition, prefix=prefix)


def late(operation: str, partition: str, times: int) -> Callable[[str, str, Sequence[str]], None]:
    """`operation` on `partition` has no answer in time, the first `times` times."""
    left = times

    def fail(op: str, where: str, keys: Sequence[str]) -> None:
        nonlocal left
        if (op, where) == (operation, partition) and left > 0:
            left -= 1
            raise DataPlaneTimeout(op, partition=where, seconds=30, outcome="none")

    return fail
