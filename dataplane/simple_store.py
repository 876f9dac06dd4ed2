"""A `Store` on TransferQueue's SimpleStorage: units that keep rows in their memory.

Its requests are made here, one for each unit: TransferQueue's own put and get go through nested tensors, which take most of
their time, and its clear passes over errors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import zmq

from dataplane.errors import DataPlaneDown
from dataplane.queue_store import BatchMeta, QueueStore, open_client, server_info
from dataplane.ragged import Batch, schema_of
from dataplane.spec import PlaneSpec, ServerAddress
from dataplane.store import NoAnswer, Vanished

# After `queue_store`, which sets what TransferQueue reads while it is imported.
from transfer_queue.storage.managers.simple_storage_manager import RoutingGroup, StorageUnitTimeout  # isort: skip
from transfer_queue.storage.simple_storage import StorageKeyNotFoundError  # isort: skip

ATTEMPTS = 3


class SimpleStore(QueueStore):
    """See `Store`."""

    reads_in_place = False

    @classmethod
    async def connect(cls, spec: PlaneSpec) -> SimpleStore:
        """Greet the controller and every storage unit. Raises DataPlaneDown, naming the one that is silent."""
        units = {unit.id: server_info(unit) for unit in spec.storage}
        store = cls(open_client(spec.controller, "SimpleStorage", {"zmq_info": units}))
        try:
            for unit in spec.storage:
                await store._greet(unit)
        except BaseException:
            store.close()
            raise
        return store

    async def write(self, meta: BatchMeta, batch: Batch) -> None:
        async def send(unit: str, group: RoutingGroup) -> None:
            part = {name: [column.rows[i] for i in group.batch_positions] for name, column in batch.items()}
            await self._ask(unit, "_put_to_single_storage_unit", group.global_indexes, part)

        await self._on_units(meta, send)
        await self._client.storage_manager.notify_data_update(
            meta.partition_ids[0], meta.global_indexes, schema_of(batch)
        )

    async def read(self, meta: BatchMeta, columns: Sequence[str]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {name: [None] * meta.size for name in columns}

        async def fetch(unit: str, group: RoutingGroup) -> None:
            try:
                _, part = await self._ask(unit, "_get_from_single_storage_unit", group.global_indexes, list(columns))
            except StorageKeyNotFoundError as error:
                raise Vanished from error
            for name, rows in found.items():
                for position, row in zip(group.batch_positions, part[name], strict=True):
                    rows[position] = row

        await self._on_units(meta, fetch)
        return found

    async def erase(self, meta: BatchMeta) -> None:
        await self._client._mark_clearing_in_controller(meta)

        async def drop(unit: str, group: RoutingGroup) -> None:
            await self._ask(unit, "_clear_single_storage_unit", group.global_indexes)

        await self._on_units(meta, drop)
        await self._client._clear_meta_in_controller(meta)

    async def _on_units(self, meta: BatchMeta, do: Callable[[str, RoutingGroup], Awaitable[None]]) -> None:
        """Do it with each unit's part of the rows, with all at once, to the end; then raise the first error."""
        errors: list[Exception] = []

        async def part(unit: str, group: RoutingGroup) -> None:
            try:
                await do(unit, group)
            except Exception as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for unit, group in self._client.storage_manager._group_by_hash(meta.global_indexes).items():
                tasks.start_soon(part, unit, group)
        if errors:
            raise errors[0]

    async def _ask(self, unit: str, request: str, *arguments: object) -> Any:
        """Make a request, and again, on a fresh connection, when the old one lost it."""
        for attempt in range(ATTEMPTS):
            self.retries += attempt > 0
            try:
                return await getattr(self._client.storage_manager, request)(*arguments, target_storage_unit=unit)
            except (zmq.Again, StorageUnitTimeout):
                continue
        raise NoAnswer(f"no answer from storage unit {unit} to {ATTEMPTS} requests")

    async def _greet(self, unit: ServerAddress) -> None:
        try:
            await self._client.storage_manager._probe_storage_unit(target_storage_unit=unit.id)
        except zmq.Again as error:
            raise DataPlaneDown(f"no answer from {unit}") from error
