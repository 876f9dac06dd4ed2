"""How a process reaches the run's data plane: plain data that travels in a worker's spec (JSON), never a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Literal

import anyio.to_thread
from msgspec import Meta, Struct

if TYPE_CHECKING:
    from dataplane.plane import DataPlane
    from dataplane.transferqueue import TransferQueuePlane


class ServerAddress(Struct, frozen=True, forbid_unknown_fields=True):
    """One server: its role and id, its ports by name, and what runs there, as "package version"."""

    role: Literal["controller", "storage", "master"]
    id: str
    ip: str
    ports: Mapping[str, Annotated[int, Meta(ge=1, le=65535)]]
    software: str = ""

    @property
    def life_port(self) -> int:
        """The port on which an idle connection can be held to learn of the server's end."""
        return self.ports.get("life") or min(self.ports.values())

    def __str__(self) -> str:
        ports = ", ".join(f"{name} {port}" for name, port in self.ports.items())
        return f"the data plane's {self.role} server {self.id} at {self.ip} ({ports})"


class MooncakeSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a client of MooncakeStore needs to know besides the storage servers, whose ids are their names in Mooncake."""

    master: ServerAddress
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    """RDMA devices, separated by commas; empty lets Mooncake choose."""


class PlaneSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Addresses of a running TransferQueue (one controller, its storage servers), and the default deadline in seconds."""

    controller: ServerAddress
    storage: Annotated[tuple[ServerAddress, ...], Meta(min_length=1)]
    timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    mooncake: MooncakeSpec | None = None
    """Set where the rows are kept by MooncakeStore; else by TransferQueue's own SimpleStorage."""

    @property
    def backend(self) -> Literal["simple", "mooncake"]:
        return "simple" if self.mooncake is None else "mooncake"

    @property
    def servers(self) -> tuple[ServerAddress, ...]:
        """All of them: when one is gone, so is the plane."""
        master = () if self.mooncake is None else (self.mooncake.master,)
        return (self.controller, *master, *self.storage)


async def connect(spec: PlaneSpec) -> DataPlane:
    """Attach to the data plane that `spec` names. Its servers were started by `dataplane.servers`.

    The first call of a process imports torch and TransferQueue, in a thread: some 3 s, in which garbage collections stop
    the loop for up to 0.2 s at a time. Raises DataPlaneDown, naming the server, when one does not answer or runs another
    version, and when a package that the backend needs is not installed here. A cancellation leaves a thread that ends once
    the imports do.
    """
    plane = await anyio.to_thread.run_sync(_load, spec.backend, abandon_on_cancel=True)
    return await plane.connect(spec)


def _load(backend: Literal["simple", "mooncake"]) -> type[TransferQueuePlane]:
    from dataplane.transferqueue import TransferQueuePlane

    import_module(f"dataplane.{backend}_store")  # seconds that must not count against the servers' deadline
    return TransferQueuePlane
