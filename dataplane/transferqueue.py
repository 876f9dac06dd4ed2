"""The data plane on TransferQueue: its native async client, on a loop of its own, with the guarantees of `DataPlane`.

What TransferQueue does not do by itself is done here: a put is written once, verified, and taken back when it fails; a get
proves that each row is the one asked for; a clear frees rows in any state, and what it could not free is freed later; a call
has a deadline, and one that ran out of it is followed to its end before anything else may touch its keys; when a server has
died, every call ends with DataPlaneDown.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

import anyio

from dataplane import health, software
from dataplane.errors import DataPlaneDown, DataPlaneTimeout
from dataplane.janitor import Janitor
from dataplane.metrics import Metrics
from dataplane.operation import Footprint
from dataplane.plane import Column, Row
from dataplane.private_loop import PrivateLoop
from dataplane.row_store import RowStore
from dataplane.scheduler import Scheduler
from dataplane.spec import PlaneSpec
from dataplane.store import Store

T = TypeVar("T")

CLOSE_GRACE_S = 5.0
"""How long a closing plane lets the operations that are under way go on."""
CLOSE_TIMEOUT_S = 15.0
"""That grace, TransferQueue's own close (5 s), and some air."""


class TransferQueuePlane:
    """A `DataPlane`. Usable from any event loop of the process that connected it, not from a forked child.

    That a key is written once holds against all processes, save two that put the same key at the same moment: keys must
    be made so that this cannot happen. A clear belongs to one owner, after the row's producer has its acknowledgement.
    """

    def __init__(self, private: PrivateLoop, timeout: float) -> None:
        self._private = private
        self._scheduler = Scheduler(private)
        self._metrics = Metrics()
        self._retries = 0
        self._timeout = timeout
        self._store: Store | None = None
        self._rows: RowStore
        self._janitor: Janitor
        self._pid = os.getpid()
        self._closed = False
        self._closing = anyio.Lock()

    @classmethod
    async def connect(cls, spec: PlaneSpec) -> TransferQueuePlane:
        """Attach to running servers. Raises DataPlaneDown when one of them does not answer."""
        private = PrivateLoop("dataplane")
        await private.start()
        plane = cls(private, spec.timeout_s)

        async def attach() -> None:
            software.require_same(spec.servers)
            servers = [(str(server), server.ip, server.life_port) for server in spec.servers]
            for server in servers:
                await health.require(*server)
            plane._store = await _connect_store(spec)
            plane._rows = RowStore(plane._store, plane._metrics)
            plane._janitor = Janitor(private, plane._scheduler, plane._rows.debts, plane._rows.clear)
            for server in servers:
                private.spawn_service(partial(health.watch, *server, plane._scheduler.fail))

        try:
            nothing = Footprint("", None, writes=False)
            await plane._scheduler.run("connect", nothing, attach, timeout=spec.timeout_s)
        except DataPlaneTimeout as error:
            await plane.aclose()
            raise DataPlaneDown(f"the data plane's servers did not answer within {spec.timeout_s:g} s") from error
        except BaseException:
            await plane.aclose()
            raise
        return plane

    @property
    def unsettled(self) -> int:
        """Writes whose callers were told "outcome unknown", and that still go on."""
        return self._scheduler.unsettled

    async def put(self, partition: str, rows: Mapping[str, Row], *, timeout: float | None = None) -> None:
        """See `DataPlane`. A put that ends after its deadline is taken back, so that it can be tried again."""
        keys = list(rows)
        await self._run(
            "put",
            Footprint(partition, frozenset(keys), writes=True),
            lambda: self._rows.put(partition, rows),
            timeout,
            undo=lambda: self._rows.clear(partition, keys),
        )

    async def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str], *, timeout: float | None = None
    ) -> list[dict[str, Column]]:
        """See `DataPlane`."""
        footprint = Footprint(partition, frozenset(keys), writes=False)
        return await self._run("get", footprint, lambda: self._rows.get(partition, keys, columns), timeout)

    async def clear(self, partition: str, keys: Collection[str], *, timeout: float | None = None) -> int:
        """See `DataPlane`. Also frees keys whose put failed halfway in another process."""
        unique = list(dict.fromkeys(keys))
        footprint = Footprint(partition, frozenset(unique), writes=True)
        return await self._run("clear", footprint, lambda: self._rows.clear(partition, unique), timeout)

    async def keys(self, partition: str, *, prefix: str = "", timeout: float | None = None) -> list[str]:
        """See `DataPlane`. Lists keys that occupy the partition, also those whose put goes on in another process."""
        footprint = Footprint(partition, None, writes=False)
        return await self._run("keys", footprint, lambda: self._rows.keys(partition, prefix), timeout)

    def take_metrics(self) -> dict[str, float]:
        """See `DataPlane`. Of each kind of call `put_calls`, `put_s` (their sum), `put_max_s` and so on; of that, on the
        private loop, `encode_*` and `decode_*`; `timeouts`; `retries` of requests that a server did not answer; and as they
        are now, `unsettled` writes and `owed` keys, which the janitor has yet to free."""
        retries = 0 if self._store is None else self._store.retries + self._janitor.attempts
        repeated, self._retries = retries - self._retries, retries
        owed = self._rows.debts.count
        return {**self._metrics.take(), "retries": repeated, "unsettled": self.unsettled, "owed": owed}

    async def aclose(self) -> None:
        """See `DataPlane`. Operations under way may go on for 5 s; then their callers get DataPlaneDown."""
        with anyio.CancelScope(shield=True):
            async with self._closing:
                if not self._closed:
                    self._closed = True
                    await self._private.aclose(grace=CLOSE_GRACE_S, limit=CLOSE_TIMEOUT_S, on_exit=self._disconnect)

    def _disconnect(self) -> None:
        if self._store is not None:
            self._store.close()

    async def _run(
        self,
        name: str,
        footprint: Footprint,
        work: Callable[[], Awaitable[T]],
        timeout: float | None = None,
        *,
        undo: Callable[[], Awaitable[object]] | None = None,
    ) -> T:
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self._closed:
            raise DataPlaneDown("this plane was closed")
        if os.getpid() != self._pid:
            raise DataPlaneDown(f"this plane belongs to process {self._pid}; a forked process must connect its own")
        seconds = self._timeout if timeout is None else timeout
        with self._metrics.timed(name):
            try:
                return await self._scheduler.run(name, footprint, work, timeout=seconds, undo=undo)
            except DataPlaneTimeout:
                self._metrics.add("timeouts")
                raise


async def _connect_store(spec: PlaneSpec) -> Store:
    if spec.backend == "mooncake":
        from dataplane.mooncake_store import MooncakeStore

        return await MooncakeStore.connect(spec)
    from dataplane.simple_store import SimpleStore

    return await SimpleStore.connect(spec)
