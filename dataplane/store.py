"""TransferQueue's SimpleStorage in the few verbs that a plane is built from.

TransferQueue answers "done" to some requests that were not done, and retries dead servers for long. Here a verb that
returns has taken effect, and a server that does not answer is a `NoAnswer`. Everything runs on one loop, the private one.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import anyio
from tensordict import TensorDict

from dataplane import tq_settings
from dataplane.errors import DataPlaneDown
from dataplane.spec import PlaneSpec, ServerAddress

tq_settings.apply()

# TransferQueue reads its settings while it is imported.
import zmq  # noqa: E402
from transfer_queue.client import AsyncTransferQueueClient  # noqa: E402
from transfer_queue.metadata import BatchMeta  # noqa: E402
from transfer_queue.storage.managers.simple_storage_manager import StorageUnitTimeout  # noqa: E402
from transfer_queue.storage.simple_storage import StorageKeyNotFoundError  # noqa: E402
from transfer_queue.utils.enum_utils import Role  # noqa: E402
from transfer_queue.utils.zmq_utils import ZMQServerInfo  # noqa: E402

ERASE_ATTEMPTS = 3
ZMQ_IO_THREADS = 2


class NoAnswer(Exception):
    """A storage unit did not answer, though asked more than once."""


class Vanished(Exception):
    """A row was removed by another process while it was being read."""


class SimpleStore:
    """One client of the servers. It belongs to no process-wide state: a process can hold several."""

    def __init__(self, client: AsyncTransferQueueClient) -> None:
        # Its methods are typed as far as they are public; the clear below needs three that are not.
        self._client: Any = client

    @classmethod
    async def connect(cls, spec: PlaneSpec) -> SimpleStore:
        """Greet the controller and every storage unit. Raises DataPlaneDown, naming the one that is silent."""
        client = AsyncTransferQueueClient(
            f"plane_{uuid4().hex[:12]}", _server_info(spec.controller), zmq_io_threads=ZMQ_IO_THREADS
        )
        try:
            try:
                # Blocks, for at most 4 s.
                units = {unit.id: _server_info(unit) for unit in spec.storage}
                client.initialize_storage_manager("SimpleStorage", {"zmq_info": units})
            except TimeoutError as error:
                raise DataPlaneDown(f"no answer from {_describe(spec.controller)}") from error
            for unit in spec.storage:
                await cls(client)._greet(unit)
        except BaseException:
            client.close()
            raise
        return cls(client)

    async def find(self, partition: str, keys: Sequence[str]) -> BatchMeta:
        """Those of `keys` that occupy the partition, readable or not; the meta's fields are those that all can serve."""
        return await self._client.async_kv_retrieve_meta(keys=list(keys), partition_id=partition, create=False)

    async def names(self, partition: str, meta: BatchMeta) -> list[str]:
        """The keys of found rows."""
        names = await self._client.async_kv_retrieve_keys(global_indexes=meta.global_indexes, partition_id=partition)
        return [name for name in names if name is not None]

    async def create(self, partition: str, keys: Sequence[str]) -> BatchMeta:
        """Occupy keys: from here on they must be written or erased."""
        return await self._client.async_kv_retrieve_meta(keys=list(keys), partition_id=partition, create=True)

    async def write(self, meta: BatchMeta, batch: TensorDict) -> None:
        """Store a batch. That it became readable must be verified with `find`: TransferQueue ignores a refusal there."""
        with _translated():
            await self._client.storage_manager.put_data(batch, meta)

    async def read(self, meta: BatchMeta, columns: Sequence[str]) -> TensorDict:
        """The found rows' columns."""
        with _translated():
            return await self._client.storage_manager.get_data(meta.select_fields(list(columns)))

    async def erase(self, meta: BatchMeta) -> None:
        """Free rows in whatever state they are. Only when every unit has dropped its part are their numbers released.

        Raises NoAnswer with the rows unreadable but still occupied; erasing them again is safe.
        """
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

    async def keys(self, partition: str) -> list[str]:
        """All keys that occupy the partition."""
        listing = await self._client.async_kv_list(partition)
        return list(listing.get(partition, {}))

    def close(self) -> None:
        """Close the sockets; nothing may be under way. The servers do not notice. Blocks, for at most 5 s."""
        self._client.close()

    async def _greet(self, unit: ServerAddress) -> None:
        try:
            await self._client.storage_manager._probe_storage_unit(target_storage_unit=unit.id)
        except zmq.Again as error:
            raise DataPlaneDown(f"no answer from {_describe(unit)}") from error

    async def _drop(self, unit: str, indexes: Collection[int]) -> None:
        for _ in range(ERASE_ATTEMPTS):
            try:
                await self._client.storage_manager._clear_single_storage_unit(indexes, target_storage_unit=unit)
                return
            except zmq.Again:
                continue
        raise NoAnswer(f"no answer from storage unit {unit} to {ERASE_ATTEMPTS} requests to clear")


@contextmanager
def _translated() -> Generator[None]:
    try:
        yield
    except StorageUnitTimeout as error:
        raise NoAnswer(str(error)) from error
    except StorageKeyNotFoundError as error:
        raise Vanished from error


def _server_info(address: ServerAddress) -> ZMQServerInfo:
    role = Role.CONTROLLER if address.role == "controller" else Role.STORAGE
    return ZMQServerInfo(role=role, id=address.id, ip=address.ip, ports=dict(address.ports))


def _describe(address: ServerAddress) -> str:
    ports = ", ".join(f"{name} {port}" for name, port in address.ports.items())
    return f"the data plane's {address.role} server {address.id} at {address.ip} ({ports})"
