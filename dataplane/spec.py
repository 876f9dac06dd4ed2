"""How a process reaches the run's data plane: plain data that travels in a worker's spec (JSON), never a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import anyio.to_thread
from msgspec import Meta, Struct

from dataplane.plane import DataPlane

if TYPE_CHECKING:
    from dataplane.transferqueue import TransferQueuePlane


class ServerAddress(Struct, frozen=True, forbid_unknown_fields=True):
    """One TransferQueue server: its role and id, and the ZMQ ports by name."""

    role: Literal["controller", "storage"]
    id: str
    ip: str
    ports: Mapping[str, int]


class PlaneSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Addresses of a running TransferQueue (one controller, its storage units), and the default deadline in seconds."""

    controller: ServerAddress
    storage: Annotated[tuple[ServerAddress, ...], Meta(min_length=1)]
    timeout_s: Annotated[float, Meta(gt=0)] = 30.0


async def connect(spec: PlaneSpec) -> DataPlane:
    """Attach to the data plane that `spec` names. Its servers were started by `dataplane.servers`.

    The first call of a process imports torch and TransferQueue, in a thread: some 3 s, in which garbage collections stop
    the loop for up to 0.2 s at a time. Raises DataPlaneDown, naming the server, when one does not answer.
    """
    plane = await anyio.to_thread.run_sync(_load)
    return await plane.connect(spec)


def _load() -> type[TransferQueuePlane]:
    from dataplane.transferqueue import TransferQueuePlane

    return TransferQueuePlane
