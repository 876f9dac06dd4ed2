"""Two ways to one TransferQueue with the same verbs: its own async API, and a plane. And ways to stop either in mid-call."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import anyio
import numpy as np
import torch
import transfer_queue as tq
from anyio.to_thread import run_sync
from tensordict import TensorDict
from transfer_queue import interface

from dataplane.errors import DataPlaneError
from dataplane.plane import Row
from dataplane.spec import PlaneSpec, connect
from dataplane.transferqueue import TransferQueuePlane, _connect_store

UNIT_WRITE = "_put_to_single_storage_unit"

Found = list[dict[str, list[Any]]]


class Party(ABC):
    """A client of its own. `client` is TransferQueue's."""

    client: Any

    @property
    @abstractmethod
    def writing(self) -> tuple[Any, str]:
        """The async method that stores a part of a put, and whose it is."""

    @property
    @abstractmethod
    def mooncake(self) -> tuple[Any, str]:
        """The attribute that holds Mooncake's own client, and whose it is."""

    @abstractmethod
    async def put(self, partition: str, rows: Mapping[str, Row]) -> None: ...

    @abstractmethod
    async def get(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> Found:
        """What the caller is given: not all columns, nor all rows, if that is so."""

    @abstractmethod
    async def clear(self, partition: str, keys: Sequence[str]) -> None: ...

    @abstractmethod
    async def keys(self, partition: str) -> list[str]: ...

    @abstractmethod
    async def note(self, partition: str, key: str, name: str) -> None:
        """Say something of a row that is there."""

    @abstractmethod
    async def notes(self, partition: str, key: str) -> set[str]: ...

    async def found(self, partition: str, keys: Sequence[str], column: str = "ids") -> list[Any] | None:
        """Each row's first value; None when the get is refused."""
        try:
            return [row[column][0] for row in await self.get(partition, keys, [column])]
        except Exception:
            return None

    async def unreadable(self, partition: str) -> list[str]:
        """Keys that are there and cannot be read."""
        return [key for key in await self.keys(partition) if await self.found(partition, [key]) is None]


class Planes(Party):
    def __init__(self, plane: TransferQueuePlane) -> None:
        self.plane = plane
        self._store: Any = plane._store
        self.client = self._store._client

    @property
    def writing(self) -> tuple[Any, str]:
        manager = self.client.storage_manager
        return (manager, UNIT_WRITE) if hasattr(manager, UNIT_WRITE) else (self._store, "_blocking")

    @property
    def mooncake(self) -> tuple[Any, str]:
        return self._store, "_objects"

    async def put(self, partition: str, rows: Mapping[str, Row]) -> None:
        await self.plane.put(partition, rows)

    async def get(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> Found:
        rows = await self.plane.get(partition, keys, columns)
        return [{name: column.tolist() for name, column in row.items()} for row in rows]

    async def clear(self, partition: str, keys: Sequence[str]) -> None:
        await self.plane.clear(partition, keys)

    async def keys(self, partition: str) -> list[str]:
        return await self.plane.keys(partition)

    async def note(self, partition: str, key: str, name: str) -> None:
        await self.plane.put(partition, {key: {name: np.ones(1, np.int64)}})

    async def notes(self, partition: str, key: str) -> set[str]:
        names = [f"note{n}" for n in range(10)]
        return {name for name in names if await self.found(partition, [key], name) is not None}


class Bare(Party):
    """TransferQueue's own functions, which belong to one client per process, given another one for each call."""

    def __init__(self, client: Any) -> None:
        self.client = client

    @property
    def writing(self) -> tuple[Any, str]:
        return self.client.storage_manager, UNIT_WRITE

    @property
    def mooncake(self) -> tuple[Any, str]:
        return self.client.storage_manager.storage_client, "_store"

    def _tq(self) -> Any:
        interface._TQ_CLIENT = self.client  # read before the first await
        return tq

    async def put(self, partition: str, rows: Mapping[str, Row]) -> None:
        names = next(iter(rows.values()))
        columns: dict[str, Any] = {
            name: torch.nested.as_nested_tensor(
                [torch.from_numpy(row[name]) for row in rows.values()], layout=torch.jagged
            )
            for name in names
        }
        batch = TensorDict(columns, batch_size=len(rows))
        await self._tq().async_kv_batch_put(keys=list(rows), partition_id=partition, fields=batch)

    async def get(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> Found:
        batch: Any = await self._tq().async_kv_batch_get(
            keys=list(keys), partition_id=partition, select_fields=list(columns)
        )
        rows = range(batch.batch_size[0])
        return [{name: batch[name].unbind()[i].tolist() for name in sorted(batch.keys())} for i in rows]

    async def clear(self, partition: str, keys: Sequence[str]) -> None:
        await self._tq().async_kv_clear(keys=list(keys), partition_id=partition)

    async def keys(self, partition: str) -> list[str]:
        return list(await self._tags(partition))

    async def note(self, partition: str, key: str, name: str) -> None:
        await self._tq().async_kv_batch_put(keys=[key], partition_id=partition, tags=[{name: 1}])

    async def notes(self, partition: str, key: str) -> set[str]:
        return set((await self._tags(partition)).get(key, {}))

    async def _tags(self, partition: str) -> dict[str, Any]:
        return (await self._tq().async_kv_list(partition)).get(partition, {})


@asynccontextmanager
async def planes(spec: PlaneSpec, count: int = 2) -> AsyncGenerator[list[Party]]:
    opened = [await connect(spec) for _ in range(count)]
    try:
        yield [Planes(plane) for plane in opened if isinstance(plane, TransferQueuePlane)]
    finally:
        for plane in opened:
            await plane.aclose()


@asynccontextmanager
async def bare(spec: PlaneSpec, count: int = 2) -> AsyncGenerator[list[Party]]:
    stores: list[Any] = [await _connect_store(spec) for _ in range(count)]
    for store in stores:
        # To know how many threads it may use, a get from Mooncake would ask Ray, and so start a cluster.
        store._client.storage_manager._get_executor = lambda: None
    try:
        yield [Bare(store._client) for store in stores]
    finally:
        interface._TQ_CLIENT = None
        for store in stores:
            store.close()


class Stop:
    """A place in a call that is reached, and left when the test says so. It may lie on another thread's loop."""

    def __init__(self) -> None:
        self.used = False
        self._reached, self._left = threading.Event(), threading.Event()

    async def pass_by(self) -> None:
        self.used = True
        self._reached.set()
        await run_sync(self._left.wait, abandon_on_cancel=True)

    async def reached(self) -> None:
        with anyio.fail_after(20):
            await run_sync(self._reached.wait, abandon_on_cancel=True)

    def passed(self) -> None:
        """The call has ended without it."""
        self._reached.set()

    def leave(self) -> None:
        self._left.set()


@asynccontextmanager
async def stopped(client: Any, method: str, when: Callable[..., bool] = lambda *_, **__: True) -> AsyncGenerator[Stop]:
    """The first call of the client's method stops when it has its answer."""
    stop, original = Stop(), getattr(client, method)

    async def call(*arguments: Any, **named: Any) -> Any:
        answer = await original(*arguments, **named)
        if not stop.used and when(*arguments, **named):
            await stop.pass_by()
        return answer

    setattr(client, method, call)
    try:
        yield stop
    finally:
        stop.leave()
        setattr(client, method, original)


class _Between:
    """Mooncake's client, of which some methods are called with the original as their first argument."""

    def __init__(self, client: Any, replaced: Mapping[str, Callable[..., object]]) -> None:
        self._client, self._replaced = client, replaced

    def __getattr__(self, name: str) -> Any:
        original = getattr(self._client, name)
        return partial(self._replaced[name], original) if name in self._replaced else original


@contextmanager
def mooncake_replaced(party: Party, **methods: Callable[..., object]) -> Generator[None]:
    """What a party's calls to Mooncake meet instead."""
    owner, name = party.mooncake
    original = getattr(owner, name)
    setattr(owner, name, _Between(original, methods))
    try:
        yield
    finally:
        setattr(owner, name, original)


async def quietly(call: Callable[[], Any]) -> bool:
    """Whether the call was acknowledged; an error is an answer too."""
    try:
        await call()
    except (DataPlaneError, RuntimeError, ValueError, KeyError):
        return False
    return True
