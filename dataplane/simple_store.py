"""A `Store` on TransferQueue's SimpleStorage: units that keep rows in their memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import anyio
import zmq

from dataplane.errors import DataPlaneDown
from dataplane.queue_store import BatchMeta, QueueStore, open_client, server_info
from dataplane.spec import PlaneSpec, ServerAddress
from dataplane.store import NoAnswer

ERASE_ATTEMPTS = 3


class SimpleStore(QueueStore):
    """See `Store`."""

    @classmethod
    async def connect(cls, spec: PlaneSpec) -> SimpleStore:
        """Greet the controller and every storage unit. Raises DataPlaneDown, naming the one that is silent."""
        units = {unit.id: server_info(unit) for unit in spec.storage}
        store = cls(open_client(spec.controller, "SimpleStorage", {"zmq_info": units}))
        store._count_retries()
        try:
            for unit in spec.storage:
                await store._greet(unit)
        except BaseException:
            store.close()
            raise
        return store

    async def erase(self, meta: BatchMeta) -> None:
        await self._client._mark_clearing_in_controller(meta)
        errors: list[Exception] = []

        async def drop(unit: str, indexes: Collection[int]) -> None:
            try:
                await self._drop(unit, indexes)
            except Exception as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for unit, group in self._client.storage_manager._group_by_hash(meta.global_indexes).items():
                tasks.start_soon(drop, unit, group.global_indexes)
        if errors:
            raise errors[0]
        await self._client._clear_meta_in_controller(meta)

    def _count_retries(self) -> None:
        """TransferQueue's own put and get repeat a request that was not answered, and tell nobody."""
        manager = self._client.storage_manager
        request = manager._request_with_retry

        async def counted(operation: str, unit: str, context: str, make: Callable[[], Any], **rest: Any) -> Any:
            attempts = 0

            def attempt() -> Any:
                nonlocal attempts
                attempts += 1
                self.retries += attempts > 1
                return make()

            return await request(operation, unit, context, attempt, **rest)

        manager._request_with_retry = counted

    async def _greet(self, unit: ServerAddress) -> None:
        try:
            await self._client.storage_manager._probe_storage_unit(target_storage_unit=unit.id)
        except zmq.Again as error:
            raise DataPlaneDown(f"no answer from {unit}") from error

    async def _drop(self, unit: str, indexes: Collection[int]) -> None:
        for attempt in range(ERASE_ATTEMPTS):
            self.retries += attempt > 0
            try:
                await self._client.storage_manager._clear_single_storage_unit(indexes, target_storage_unit=unit)
                return
            except zmq.Again:
                continue
        raise NoAnswer(f"no answer from storage unit {unit} to {ERASE_ATTEMPTS} requests to clear")
