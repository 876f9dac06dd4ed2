"""One server on a node of a Ray cluster: an actor that starts it as a child process and tells where it serves, how it ended.

The server is the very process that runs without Ray. It ends with the actor, and the actor with the driver that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import anyio
import msgspec
import ray.util

from dataplane.errors import DataPlaneDown
from dataplane.server_process import ServerProcess
from dataplane.spec import ServerAddress


class ServerHost:
    """Made into an actor by the driver. Its methods run together on the actor's event loop."""

    def __init__(self) -> None:
        self._spec: str | None = None
        self._address: ServerAddress | None = None
        self._greeted = anyio.Event()

    async def serve(self, name: str, module: str, arguments: Sequence[str]) -> str:
        """Start the server; return when it has ended, with the reason and its last words."""
        host: str = cast("Any", ray.util).get_node_ip_address()
        process = await ServerProcess.spawn(name, module, [*arguments, "--host", host])
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._greet, process)
                await process.watch()
        finally:
            with anyio.CancelScope(shield=True):
                await process.stop()
        return f"{process.obituary}, on node {host}{process.last_words()}"

    async def address(self) -> bytes | None:
        """Its address as JSON, once it serves; None when it ended before."""
        await self._greeted.wait()
        return None if self._address is None else msgspec.json.encode(self._address)

    async def publish(self, spec: str) -> None:
        """Keep the data plane's spec for those who ask this actor, by its name, where the plane is."""
        self._spec = spec

    async def spec(self) -> str | None:
        """The data plane's spec as JSON; None while its servers start."""
        return self._spec

    async def _greet(self, process: ServerProcess) -> None:
        try:
            self._address = await process.hello(ServerAddress)
        except DataPlaneDown:
            return  # `serve` returns with the reason
        finally:
            self._greeted.set()
