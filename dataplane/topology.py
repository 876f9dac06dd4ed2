"""Of which servers a data plane consists, and in which order they start, wherever they are started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

import anyio
from msgspec import Meta, Struct

from dataplane.spec import MooncakeSpec, PlaneSpec, ServerAddress

TRANSFER_QUEUE = "dataplane.serve"
MOONCAKE = "dataplane.serve_mooncake"
CONTROLLER, MASTER = "controller", "Mooncake master"


class MooncakeSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How MooncakeStore keeps rows, where it is the backend."""

    memory_mb: Annotated[int, Meta(ge=16)] = 1024
    """Memory of each storage process for rows, in MiB. A put that does not fit fails."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """How rows travel."""
    devices: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:,-]*$", description="names")] = ""
    """RDMA devices, separated by commas; empty lets Mooncake choose."""


class Topology(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A controller and storage servers; with `mooncake` a master too, else the storage is TransferQueue's own."""

    storage_units: Annotated[int, Meta(ge=1)] = 1
    mooncake: MooncakeSettings | None = None
    plane_timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    """Default deadline of the planes that connect."""

    @property
    def servers(self) -> int:
        return 1 + self.storage_units + (self.mooncake is not None)


class Launcher(Protocol):
    async def launch(self, name: str, module: str, arguments: Sequence[str]) -> ServerAddress:
        """Start `python -m MODULE ARGUMENTS --host ...` and return the address that it prints."""
        ...


async def launch_all(launcher: Launcher, topology: Topology) -> PlaneSpec:
    """Start every server and return when all of them serve."""
    found: dict[str, ServerAddress] = {}
    mooncake = topology.mooncake

    async def one(name: str, module: str, arguments: Sequence[str]) -> None:
        found[name] = await launcher.launch(name, module, arguments)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one, CONTROLLER, TRANSFER_QUEUE, ["controller"])
        storage, arguments = TRANSFER_QUEUE, ["storage"]
        if mooncake is not None:
            await one(MASTER, MOONCAKE, ["master"])
            master = found[MASTER]
            storage, arguments = MOONCAKE, [
                *("storage", "--master", f"{master.ip}:{master.ports['rpc']}", "--memory-mb", str(mooncake.memory_mb)),
                *("--protocol", mooncake.protocol, "--devices", mooncake.devices),
            ]  # fmt: skip
        for index in range(topology.storage_units):
            tasks.start_soon(one, unit_name(index), storage, arguments)
    return PlaneSpec(
        controller=found[CONTROLLER],
        storage=tuple(found[unit_name(index)] for index in range(topology.storage_units)),
        timeout_s=topology.plane_timeout_s,
        mooncake=mooncake and MooncakeSpec(master=found[MASTER], protocol=mooncake.protocol, devices=mooncake.devices),
    )


def unit_name(index: int) -> str:
    return f"storage unit {index}"
