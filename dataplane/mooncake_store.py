"""A `Store` on TransferQueue's MooncakeStore: rows are kept in the memory of Mooncake's storage servers.

Objects have the names and the layout that TransferQueue gives them, one for each column of a row, so its own client can read
them. Mooncake's calls block, with a frozen master for 30 s: each one is made in a thread.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast
from uuid import uuid4

import anyio
import anyio.to_thread
import torch

from dataplane import software
from dataplane.codec import ROW_ID
from dataplane.errors import DataPlaneDown, DataPlaneError
from dataplane.queue_store import BatchMeta, QueueStore, open_client
from dataplane.ragged import Batch, schema_of
from dataplane.spec import MooncakeSpec, PlaneSpec, ServerAddress
from dataplane.store import NoAnswer, Vanished

T = TypeVar("T")

LOCAL_BUFFER_BYTES = 16 * 2**20
"""Mooncake's own staging buffer, which reads and writes of registered memory do not use."""
MAX_THREADS = 16
"""Calls of one client at the same time, those included whose callers have left."""
GREETING_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 3.0
EXIT_TIMEOUT_S = 10.0
"""For calls that are under way when the client is closed, and when the process ends."""

DONE, NO_SPACE, NOT_READY, NOT_FOUND, LEASE_EXPIRED = 0, -200, -703, -704, -707
NO_ANSWER = (LEASE_EXPIRED, -800, -900, -901)
"""The storage took longer than what is read is kept for the reader (10 s); transfer failed; the master's connection failed;
the master did not answer."""
CALL_OF_NOTHING = struct.pack("<4B4I", 21, 0, 0, 0, 0, 0, 0, 0)
"""A request to the master as its coro_rpc reads it (magic, version, serialisation, kind; sequence number, function, length,
attachment), of a function that there is not: the refusal begins with the magic number too."""
READS = 3
"""Of a column, when its storage is slow."""


class MooncakeStore(QueueStore):
    """See `Store`."""

    reads_in_place = True

    def __init__(self, client: Any, objects: Any) -> None:
        super().__init__(client)
        self._objects = objects
        """Mooncake's own client. It must not be closed while a call is in it: that ends the process with SIGSEGV."""
        self._limiter = anyio.CapacityLimiter(MAX_THREADS)
        self._idle = threading.Condition()
        self._calls = 0
        self._closed = False

    @classmethod
    async def connect(cls, spec: PlaneSpec) -> MooncakeStore:
        """Greet the controller, the master and every storage server. Raises DataPlaneDown, naming the one that is silent."""
        mooncake = cast("MooncakeSpec", spec.mooncake)
        if problem := software.mooncake_problem():
            raise DataPlaneDown(f"the rows are kept by MooncakeStore, but {problem}")
        # Mooncake's set-up holds the interpreter while it waits for its master, so it must be known to answer.
        await _greet_master(mooncake.master)
        config = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"{mooncake.master.ip}:{mooncake.master.ports['rpc']}",
            "local_hostname": _own_address(mooncake.master),
            "protocol": mooncake.protocol,
            "device_name": mooncake.devices,
            "global_segment_size": 0,  # a client's death must not take rows with it
            "local_buffer_size": LOCAL_BUFFER_BYTES,
        }
        client: Any = open_client(spec.controller, "MooncakeStore", config)
        store = cls(client, client.storage_manager.storage_client._store)
        try:
            for server in spec.storage:
                await store._greet(server)
        except BaseException:
            store.close()
            raise
        return store

    async def write(self, meta: BatchMeta, batch: Batch) -> None:
        for name, column in batch.items():
            codes = await self._blocking(self._put, _names(meta, name), *column.joined())
            _raise_for(codes, "put")
        # Beside its identity each row says which columns it has: `erase` must name every object.
        belongings = {index: {ROW_ID: sorted(batch)} for index in meta.global_indexes}
        await self._client.storage_manager.notify_data_update(
            meta.partition_ids[0], meta.global_indexes, schema_of(batch), belongings
        )

    async def read(self, meta: BatchMeta, columns: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        found: dict[str, list[torch.Tensor]] = {}
        for name in columns:
            lengths = [int(shape[0]) for shape in cast("list[Any]", meta.get_shapes(name))]
            bounds = [0, *accumulate(lengths)]
            values = torch.empty(bounds[-1], dtype=meta.field_schema[name]["dtype"])
            codes = await self._blocking(self._get, _names(meta, name), values, bounds)
            for _ in range(READS - 1):
                if LEASE_EXPIRED not in codes:
                    break
                self.retries += 1
                codes = await self._blocking(self._get, _names(meta, name), values, bounds)
            _raise_for(codes, "get")
            if codes != [length * values.element_size() for length in lengths]:
                raise DataPlaneError(f"column {name!r} was not stored with the lengths that TransferQueue knows")
            found[name] = list(cast("Any", values).split(lengths))
        return found

    async def erase(self, meta: BatchMeta) -> None:
        await self._client._mark_clearing_in_controller(meta)
        belongings: list[list[str] | None] = [row.get(ROW_ID) for row in cast("Any", meta)._custom_backend_meta]
        if None in belongings:
            # Rows that are not whole do not say what they have: ask the master for all objects of these numbers. It goes
            # through every object it knows.
            numbers = "|".join(map(str, meta.global_indexes))
            removed = await self._blocking(self._objects.remove_by_regex, f"^(?:{numbers})@", True)
            codes = [min(removed, DONE)]
        else:
            names = [
                _name(index, column)
                for index, columns in zip(meta.global_indexes, belongings, strict=True)
                for column in columns or ()
            ]
            codes = await self._blocking(self._objects.batch_remove, names, True)
        _raise_for([code for code in codes if code != NOT_FOUND], "clear")
        await self._client._clear_meta_in_controller(meta)

    def close(self) -> None:
        with self._idle:
            self._closed = True
            idle = self._idle.wait_for(lambda: not self._calls, CLOSE_TIMEOUT_S)
        if idle:
            self._objects.close()
        else:  # the last call does it, when its server has answered or is gone
            atexit.register(self._end_at_exit)
        super().close()

    def _end_at_exit(self) -> None:
        """A process that ends while a call is in Mooncake's client dies of SIGABRT: better late, or with a plain error."""
        with self._idle:
            if self._idle.wait_for(lambda: not self._calls, EXIT_TIMEOUT_S):
                return
        os.write(2, b"Mooncake's servers do not answer: this process ends without closing its client\n")
        os._exit(1)

    async def _greet(self, server: ServerAddress) -> None:
        """Write, read and remove an object on this server."""
        config = software.mooncake_store().ReplicateConfig()
        config.preferred_segment = server.id
        name, value = f"greeting to {server.id} {uuid4().hex}", torch.arange(2)
        try:
            with anyio.fail_after(GREETING_TIMEOUT_S):
                await self._blocking(self._put, [name], value, [0, 2], config)
                codes = await self._blocking(self._get, [name], torch.empty_like(value), [0, 2])
                await self._blocking(self._objects.batch_remove, [name], True)
        except TimeoutError as error:
            raise DataPlaneDown(f"no answer from {server}") from error
        if codes != [value.nbytes]:
            raise DataPlaneDown(f"no answer from {server}: Mooncake's code is {codes[0]}")

    async def _blocking(self, function: Callable[..., T], *arguments: Any) -> T:
        # When the caller leaves, the thread goes on with the arrays that it holds.
        call = partial(self._call, function, *arguments)
        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)

    def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        with self._idle:
            if self._closed:
                raise DataPlaneDown("this plane was closed")
            self._calls += 1
        try:
            return function(*arguments)
        finally:
            with self._idle:
                if self._closed and self._calls == 1:
                    self._objects.close()
                self._calls -= 1
                self._idle.notify_all()

    def _put(self, names: list[str], values: torch.Tensor, bounds: list[int], config: Any = None) -> list[int]:
        options = {} if config is None else {"config": config}
        return self._move(self._objects.batch_upsert_from, names, values, bounds, **options)

    def _get(self, names: list[str], values: torch.Tensor, bounds: list[int]) -> list[int]:
        return self._move(self._objects.batch_get_into, names, values, bounds)

    def _move(
        self, move: Callable[..., list[int]], names: list[str], values: torch.Tensor, bounds: list[int], **options: Any
    ) -> list[int]:
        """One code for each name. Each lies in `values` from one bound to the next."""
        start, width = values.data_ptr(), values.element_size()
        places = [start + width * bound for bound in bounds[:-1]]
        sizes = [width * (end - begin) for begin, end in pairwise(bounds)]
        self._objects.register_buffer(start, values.nbytes)
        try:
            return move(names, places, sizes, **options)
        finally:
            self._objects.unregister_buffer(start)


def _name(index: int, column: str) -> str:
    return f"{index}@{column}"


def _names(meta: BatchMeta, column: str) -> list[str]:
    return [_name(index, column) for index in meta.global_indexes]


def _raise_for(codes: Sequence[int], operation: str) -> None:
    """Mooncake's answers, as errors. Of a read they are sizes."""
    failed = {code for code in codes if code < DONE}
    if not failed:
        return
    if failed <= {NOT_FOUND, NOT_READY}:
        raise Vanished
    if NO_SPACE in failed:
        raise DataPlaneError(
            f"{operation}: Mooncake's storage has no room for it; rows live until their step is trained: "
            "give it more memory (dataplane.mooncake.memory_mb), or let fewer groups live at the same time"
        )
    if failed.intersection(NO_ANSWER):
        raise NoAnswer(f"{operation}: no answer from Mooncake's master or storage, codes {sorted(failed)}")
    raise DataPlaneError(f"{operation}: Mooncake refused it, codes {sorted(failed)}")


async def _greet_master(master: ServerAddress) -> None:
    """Ask its admin server for the master's health, and see that it is the master that would answer calls."""
    try:
        with anyio.fail_after(GREETING_TIMEOUT_S):
            async with await anyio.connect_tcp(master.ip, master.ports["rpc"]) as connection:
                await connection.send(CALL_OF_NOTHING)
                refusal = await connection.receive(1024)
            async with await anyio.connect_tcp(master.ip, master.ports["admin"]) as connection:
                await connection.send(f"GET /health HTTP/1.1\r\nHost: {master.ip}\r\n\r\n".encode())
                answer = await connection.receive(1024)
    except (OSError, TimeoutError, anyio.EndOfStream, anyio.BrokenResourceError) as error:
        raise DataPlaneDown(f"no answer from {master}") from error
    if not refusal.startswith(CALL_OF_NOTHING[:1]):
        raise DataPlaneDown(f"another program answers at the port rpc of {master}: {refusal[:200]!r}")
    if not re.match(rb"HTTP/1\.\d 200 ", answer):
        raise DataPlaneDown(f"{master} does not serve: {answer[:200]!r}")


def _own_address(server: ServerAddress) -> str:
    """This machine's address on the network of `server`. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((server.ip, server.ports["rpc"]))
        return probe.getsockname()[0]
