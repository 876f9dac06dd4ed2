"""Starts TransferQueue's servers as plain local processes, without Ray, and takes them down again whatever happens.

One process for the controller and one for each storage unit: they share no interpreter lock, and when one freezes or dies
the others go on and the one at fault can be named.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Literal

import anyio
from anyio.abc import TaskGroup

from dataplane.errors import DataPlaneDown
from dataplane.server_process import ServerProcess
from dataplane.spec import PlaneSpec, ServerAddress


def start_servers(
    *, storage_units: int = 1, timeout_s: float = 60.0, plane_timeout_s: float = 30.0, host: str = "127.0.0.1"
) -> LocalServers:
    """Servers for the length of an `async with` block, which begins when all of them serve.

    `timeout_s` bounds their start (some 3 s when nothing else runs: the imports). `plane_timeout_s` becomes the default
    deadline of the planes that connect. The servers listen on `host` and unpickle what they are sent: whoever can reach
    it must be trusted. Entering raises DataPlaneDown, with the last lines that it printed, when a server does not come up.
    """
    return LocalServers(storage_units, timeout_s, plane_timeout_s, host)


class LocalServers:
    """One set of servers. Leaving the block stops them, in at most 6 s, and loses the rows."""

    spec: PlaneSpec
    """What a plane, in this process or another, connects with."""

    def __init__(self, storage_units: int, timeout_s: float, plane_timeout_s: float, host: str) -> None:
        self._storage_units = storage_units
        self._timeout_s = timeout_s
        self._plane_timeout_s = plane_timeout_s
        self._host = host
        self._servers: list[ServerProcess] = []
        self._tasks: TaskGroup
        self._stopping = False
        self._death: str | None = None
        self._over = anyio.Event()

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by name: "controller", "storage unit 0", ..."""
        return {server.name: server.pid for server in self._servers}

    async def wait(self) -> None:
        """Return when the servers were stopped. Raises DataPlaneDown, naming the server, when one ended by itself."""
        await self._over.wait()
        if self._death is not None:
            raise DataPlaneDown(self._death)

    async def __aenter__(self) -> LocalServers:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The block's own error leaves as it is: it is not handed to the task group, which would wrap it.
        await self._stop()

    async def _start(self) -> None:
        addresses: dict[str, ServerAddress] = {}
        with anyio.move_on_after(self._timeout_s) as limit:
            await self._spawn("controller", "controller")
            for index in range(self._storage_units):
                await self._spawn("storage", f"storage unit {index}")
            for server in self._servers:
                addresses[server.name] = await server.hello()
        if limit.cancelled_caught:
            silent = next(server for server in self._servers if server.name not in addresses)
            raise DataPlaneDown(f"{silent} was not ready within {self._timeout_s:g} s{silent.last_words()}")
        controller, *storage = addresses.values()
        self.spec = PlaneSpec(controller=controller, storage=tuple(storage), timeout_s=self._plane_timeout_s)

    async def _spawn(self, role: Literal["controller", "storage"], name: str) -> None:
        server = await ServerProcess.spawn(role, name, self._host)
        self._servers.append(server)
        self._tasks.start_soon(self._attend, server)

    async def _attend(self, server: ServerProcess) -> None:
        await server.watch()
        if not self._stopping and self._death is None:
            self._death = server.obituary + server.last_words()
            self._over.set()

    async def _stop(self) -> None:
        self._stopping = True
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as stops:
                for server in self._servers:
                    stops.start_soon(server.stop)
        self._over.set()
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)
