"""A data plane that lags, freezes, loses and alters rows as a real one's servers can. What it holds is a `MemoryPlane`'s.

Every process has a client of its own (`FakePlane`) to the one store. A write that is given up is undone in its own time.
Keys of a process that died within a put may be occupied, and cannot be read, until they are cleared.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from dataplane.errors import DataPlaneDown, DataPlaneTimeout, RowExists
from dataplane.memory import MemoryPlane
from dataplane.plane import Column, Row
from dataplane.rows import check_rows


def nothing_refused(operation: str, partition: str, keys: Sequence[str]) -> None: ...


class FakeStore:
    """The servers. `tasks` is where operations live that nobody waits for any more."""

    def __init__(self, tasks: TaskGroup, rng: random.Random, *, latency_s: Callable[[], float] = lambda: 0.002) -> None:
        self.rows = MemoryPlane()
        self.tasks = tasks
        self.rng = rng
        self.latency_s = latency_s
        self.slowness = 1.0
        self.spoils: Callable[[str, str, Row], Row] = lambda partition, key, row: row
        """What is stored of a row that is put."""
        self.refuses = nothing_refused
        """Raises the error of an operation that fails before it has done anything."""
        self.ghosts: dict[str, set[str]] = {}
        """Occupied keys without a readable row, by partition."""
        self.partitions: set[str] = set()
        """In which there was ever a row."""
        self.gone = anyio.Event()
        """Set when the servers died."""
        self._thaw = anyio.Event()
        self._thaw.set()

    def freeze(self) -> None:
        self._thaw = anyio.Event()

    def thaw(self) -> None:
        self._thaw.set()

    @property
    def down(self) -> bool:
        return self.gone.is_set()

    def kill(self) -> None:
        self.gone.set()
        self.thaw()

    async def turn(self) -> None:
        """One operation's way to the servers, and its place among those that they do."""
        await anyio.sleep(self.latency_s() * self.slowness)
        await self._thaw.wait()
        self.require_up()

    def require_up(self) -> None:
        if self.down:
            raise DataPlaneDown("the data plane's servers are gone")

    async def held(self) -> dict[str, list[str]]:
        """All keys that are there, by partition."""
        return {p: sorted({*await self.rows.keys(p), *self.ghosts.get(p, ())}) for p in sorted(self.partitions)}


class _Write:
    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.value: Any = None
        self.error: Exception | None = None
        self.abandoned = False


class FakePlane:
    """One process's client: a `DataPlane`. `alive` is whether that process still is."""

    def __init__(self, store: FakeStore, *, timeout_s: float = 30.0, alive: Callable[[], bool] = lambda: True) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._alive = alive
        self._writes: dict[str, _Write] = {}
        """The last one of each partition: what comes later takes effect later."""

    async def put(self, partition: str, rows: Mapping[str, Row], *, timeout: float | None = None) -> None:
        check_rows(partition, rows)
        store = self._store
        store.partitions.add(partition)
        ghosts = store.ghosts.setdefault(partition, set())

        async def apply(write: _Write) -> None:
            store.refuses("put", partition, list(rows))
            if occupied := [key for key in rows if key in ghosts]:
                raise RowExists("the key is occupied", partition=partition, keys=occupied)
            if not self._alive() and store.rng.random() < 0.5:
                ghosts.update(key for key in rows if store.rng.random() < 0.5)
            elif not write.abandoned:
                await store.rows.put(partition, {key: store.spoils(partition, key, row) for key, row in rows.items()})

        await self._write("put", partition, apply, timeout)

    async def clear(self, partition: str, keys: Collection[str], *, timeout: float | None = None) -> int:
        wanted = sorted(keys)
        store = self._store

        async def apply(_: _Write) -> int:
            store.refuses("clear", partition, wanted)
            ghosts = store.ghosts.setdefault(partition, set())
            occupied = ghosts & set(wanted)
            ghosts -= occupied
            return len(occupied) + await store.rows.clear(partition, wanted)

        return await self._write("clear", partition, apply, timeout)

    async def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str], *, timeout: float | None = None
    ) -> list[dict[str, Column]]:
        async def apply() -> list[dict[str, Column]]:
            self._store.refuses("get", partition, keys)
            return await self._store.rows.get(partition, keys, columns)

        return await self._read("get", partition, apply, timeout)

    async def keys(self, partition: str, *, prefix: str = "", timeout: float | None = None) -> list[str]:
        async def apply() -> list[str]:
            self._store.refuses("keys", partition, [prefix])
            ghosts = {key for key in self._store.ghosts.get(partition, ()) if key.startswith(prefix)}
            return sorted({*await self._store.rows.keys(partition, prefix=prefix), *ghosts})

        return await self._read("keys", partition, apply, timeout)

    def take_metrics(self) -> dict[str, float]:
        return {}

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def _read(
        self,
        name: Literal["get", "keys"],
        partition: str,
        apply: Callable[[], Awaitable[Any]],
        timeout: float | None,
    ) -> Any:
        seconds = self._timeout_s if timeout is None else timeout
        before = self._writes.get(partition)
        with anyio.move_on_after(seconds):
            await self._store.turn()
            if before is not None:
                await before.ended.wait()
            return await apply()
        raise DataPlaneTimeout(name, partition=partition, seconds=seconds, outcome="none")

    async def _write(
        self,
        name: Literal["put", "clear"],
        partition: str,
        apply: Callable[[_Write], Awaitable[Any]],
        timeout: float | None,
    ) -> Any:
        await anyio.lowlevel.checkpoint()
        seconds = self._timeout_s if timeout is None else timeout
        before, write = self._writes.get(partition), _Write()
        self._writes[partition] = write
        self._store.tasks.start_soon(self._carry_out, write, before, apply)
        with anyio.move_on_after(seconds, shield=True):
            await write.ended.wait()
        if not write.ended.is_set():
            write.abandoned = True
        await anyio.lowlevel.checkpoint_if_cancelled()
        if write.abandoned:
            raise DataPlaneTimeout(name, partition=partition, seconds=seconds, outcome="unknown")
        if write.error is not None:
            raise write.error
        return write.value

    async def _carry_out(self, write: _Write, before: _Write | None, apply: Callable[[_Write], Awaitable[Any]]) -> None:
        try:
            await self._store.turn()
            if before is not None:
                await before.ended.wait()
            write.value = await apply(write)
        except AssertionError:
            raise
        except Exception as error:
            write.error = error
        finally:
            write.ended.set()
