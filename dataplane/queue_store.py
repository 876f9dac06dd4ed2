"""What every `Store` on TransferQueue shares, whatever its storage: the controller's client, and the verbs that go by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from dataplane import tq_settings
from dataplane.errors import DataPlaneDown
from dataplane.spec import ServerAddress

tq_settings.apply()

# TransferQueue reads its settings while it is imported.
from transfer_queue.client import AsyncTransferQueueClient  # noqa: E402
from transfer_queue.metadata import BatchMeta  # noqa: E402
from transfer_queue.utils.enum_utils import Role  # noqa: E402
from transfer_queue.utils.zmq_utils import ZMQServerInfo  # noqa: E402

ZMQ_IO_THREADS = 2


class QueueStore:
    """The verbs of `Store` that do not touch the rows' storage."""

    def __init__(self, client: AsyncTransferQueueClient) -> None:
        # Its methods are typed as far as they are public; a store needs some that are not.
        self._client: Any = client
        self.retries = 0

    async def find(self, partition: str, keys: Sequence[str]) -> BatchMeta:
        return await self._client.async_kv_retrieve_meta(keys=list(keys), partition_id=partition, create=False)

    async def names(self, partition: str, meta: BatchMeta) -> list[str]:
        names = await self._client.async_kv_retrieve_keys(global_indexes=meta.global_indexes, partition_id=partition)
        return [name for name in names if name is not None]

    async def create(self, partition: str, keys: Sequence[str]) -> BatchMeta:
        return await self._client.async_kv_retrieve_meta(keys=list(keys), partition_id=partition, create=True)

    async def keys(self, partition: str) -> list[str]:
        listing = await self._client.async_kv_list(partition)
        return list(listing.get(partition, {}))

    def close(self) -> None:
        self._client.close()


def open_client(controller: ServerAddress, manager: str, config: Mapping[str, Any]) -> AsyncTransferQueueClient:
    """A client with its storage manager. Blocks, for at most 4 s. Raises DataPlaneDown when the controller is silent."""
    client = AsyncTransferQueueClient(
        f"plane_{uuid4().hex[:12]}", server_info(controller), zmq_io_threads=ZMQ_IO_THREADS
    )
    try:
        client.initialize_storage_manager(manager, dict(config))
    except BaseException as error:
        client.close()
        if isinstance(error, TimeoutError):
            raise DataPlaneDown(f"no answer from {controller}") from error
        raise
    return client


def server_info(address: ServerAddress) -> ZMQServerInfo:
    role = Role.CONTROLLER if address.role == "controller" else Role.STORAGE
    return ZMQServerInfo(role=role, id=address.id, ip=address.ip, ports=dict(address.ports))
