"""Starts the data plane's servers, as plain local processes or in a Ray cluster, and takes them down again whatever happens.

Each server is a process of its own: they share no interpreter lock, and when one freezes or dies the others go on and the
one at fault can be named.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup

from dataplane.errors import DataPlaneDown, first_error
from dataplane.ray_settings import RaySettings
from dataplane.server_process import ServerProcess
from dataplane.spec import PlaneSpec, ServerAddress
from dataplane.topology import MooncakeSettings, Topology, launch_all

S = TypeVar("S", bound="Servers")


def start_servers(
    *,
    storage_units: int = 1,
    timeout_s: float = 60.0,
    plane_timeout_s: float = 30.0,
    host: str = "127.0.0.1",
    mooncake: MooncakeSettings | None = None,
    ray: RaySettings | None = None,
) -> Servers:
    """Servers for the length of an `async with` block, which begins when all of them serve.

    `timeout_s` bounds their start (some 3 s when nothing else runs: the imports). `plane_timeout_s` becomes the default
    deadline of the planes that connect. With `mooncake` rows are kept by MooncakeStore, else by SimpleStorage. With `ray`
    the servers run in that cluster, on the addresses of its nodes, else here, on `host`. They unpickle what they are sent:
    whoever can reach them must be trusted. Entering raises DataPlaneDown, with the last lines that it printed, when a server
    does not come up.
    """
    topology = Topology(storage_units=storage_units, mooncake=mooncake, plane_timeout_s=plane_timeout_s)
    return LocalServers(topology, timeout_s, host) if ray is None else RayServers(topology, timeout_s, ray)


class Servers(ABC):
    """One set of servers. Leaving the block stops them, in at most 6 s, and loses the rows."""

    spec: PlaneSpec
    """What a plane, in this process or another, connects with."""

    def __init__(self, topology: Topology, timeout_s: float) -> None:
        self._topology = topology
        self._timeout_s = timeout_s
        self._processes: list[ServerProcess] = []
        self._tasks: TaskGroup
        self._stopping = False
        self._death: str | None = None
        self._over = anyio.Event()

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by name: "controller", "storage unit 0", ..."""
        return {server.name: server.pid for server in self._processes}

    async def wait(self) -> None:
        """Return when the servers were stopped. Raises DataPlaneDown, naming the server, when one ended by itself."""
        await self._over.wait()
        if self._death is not None:
            raise DataPlaneDown(self._death)

    async def __aenter__(self: S) -> S:
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

    @abstractmethod
    async def _launch(self) -> PlaneSpec: ...

    async def _start(self) -> None:
        with anyio.move_on_after(self._timeout_s) as limit:
            try:
                self.spec = await self._launch()
            except BaseExceptionGroup as errors:
                raise first_error(errors) from None  # one server's failure ends the start of the others
        if limit.cancelled_caught:
            silent = next(process for process in self._processes if not process.greeted)
            raise DataPlaneDown(f"{silent} was not ready within {self._timeout_s:g} s{silent.last_words()}")

    async def _spawn(
        self, name: str, module: str, arguments: Sequence[str], env: Mapping[str, str] | None = None
    ) -> ServerProcess:
        process = await ServerProcess.spawn(name, module, arguments, env=env)
        self._processes.append(process)
        self._tasks.start_soon(self._attend, process)
        return process

    async def _attend(self, process: ServerProcess) -> None:
        await process.watch()
        if not self._stopping and self._death is None:
            self._death = process.obituary + process.last_words()
            self._over.set()

    async def _stop(self) -> None:
        self._stopping = True
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as stops:
                for process in self._processes:
                    stops.start_soon(process.stop)
        self._over.set()
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)


class LocalServers(Servers):
    """Child processes of this one, that listen on `host`."""

    def __init__(self, topology: Topology, timeout_s: float, host: str) -> None:
        super().__init__(topology, timeout_s)
        self._host = host

    async def launch(self, name: str, module: str, arguments: Sequence[str]) -> ServerAddress:
        """See `Launcher`."""
        process = await self._spawn(name, module, [*arguments, "--host", self._host])
        return await process.hello(ServerAddress)

    async def _launch(self) -> PlaneSpec:
        return await launch_all(self, self._topology)


class RayServers(Servers):
    """Processes on the nodes of a Ray cluster. One child process joins the cluster for them: this one never does."""

    def __init__(self, topology: Topology, timeout_s: float, settings: RaySettings) -> None:
        super().__init__(topology, timeout_s)
        self._settings = settings

    async def _launch(self) -> PlaneSpec:
        topology, settings = (msgspec.json.encode(part).decode() for part in (self._topology, self._settings))
        arguments = ["--topology", topology, "--settings", settings, "--timeout", f"{self._timeout_s:g}"]
        driver = await self._spawn("Ray driver", "dataplane.ray_driver", arguments, self._settings.environment())
        return await driver.hello(PlaneSpec)
