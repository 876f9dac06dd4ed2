"""How a process reaches the run's data plane: plain data that travels in a worker's spec (JSON), never a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import anyio.to_thread
from msgspec import Struct

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
    storage: tuple[ServerAddress, ...]
    timeout_s: float = 30.0


async def connect(spec: PlaneSpec) -> DataPlane:
    """Attach to the data plane that `spec` names. Imports torch and TransferQueue on first use, in a thread.

    Raises DataPlaneDown when the servers do not answer the handshake.
    """
    plane = await anyio.to_thread.run_sync(_load)
    return await plane.connect(spec)


def _load() -> type[TransferQueuePlane]:
    from dataplane.transferqueue import TransferQueuePlane

    return TransferQueuePlane
