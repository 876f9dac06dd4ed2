"""Runs the data plane's servers in a Ray cluster: a process that joins the cluster, starts them as actors and guards them.

`python -m dataplane.ray_driver --topology JSON --settings JSON --timeout SECONDS` prints the plane's spec when all servers
serve. It ends, and they with it, when its stdin does or SIGTERM comes; when one of them ends by itself it says so and fails.
It joins an existing cluster, and never starts one. Nobody else needs Ray: planes reach the servers by their addresses.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from dataplane import software, tq_settings
from dataplane.errors import first_error
from dataplane.ray_settings import RaySettings
from dataplane.serve import handshake_channel
from dataplane.spec import PlaneSpec, ServerAddress
from dataplane.topology import CONTROLLER, Topology, launch_all

REACH_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 2.0


class Failure(Exception):
    """What is wrong, in words for the one who started the run."""


class RayLauncher:
    """A `Launcher` on the cluster that this process has joined. Actors get CPUs, node and name by the settings."""

    def __init__(self, settings: RaySettings, tasks: Any) -> None:
        self._settings = settings
        self._tasks = tasks
        self.hosts: dict[str, Any] = {}

    async def launch(self, name: str, module: str, arguments: Sequence[str]) -> ServerAddress:
        """See `Launcher`. Raises Failure when the actor or its server ends instead."""
        host = self._host(name)
        self.hosts[name] = host
        self._tasks.start_soon(self._guard, name, host.serve.remote(name, module, list(arguments)))
        encoded: bytes | None = await host.address.remote()
        if encoded is None:
            await anyio.sleep_forever()  # until the guard ends it all with the reason
        assert encoded is not None
        return msgspec.json.decode(encoded, type=ServerAddress)

    def kill(self) -> None:
        """End the actors, and with them their servers."""
        ray: Any = import_module("ray")
        for host in self.hosts.values():
            ray.kill(host)

    async def _guard(self, name: str, end: Any) -> None:
        from ray.exceptions import RayError

        try:
            why = await end
        except RayError as error:
            why = f"the actor of the data plane's {name} died: {error}"
        raise Failure(why)

    def _host(self, name: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from dataplane.ray_host import ServerHost

        ray: Any = import_module("ray")
        settings = self._settings
        here: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        placement: dict[str, Any] = {"spread": "SPREAD", "pack": "DEFAULT", "driver": here}
        actor: Any = ray.remote(ServerHost)
        try:
            return actor.options(
                name=f"data plane: {name}",
                num_cpus=settings.cpus_per_server,
                resources={settings.resource: 0.001} if settings.resource else None,
                scheduling_strategy=placement[settings.placement],
                max_restarts=0,
                # Where this package is not installed on a node but lies at the same path, as on this machine.
                runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}},
            ).remote()
        except ValueError as error:  # the name is taken
            raise Failure(
                f"there is a data plane in namespace {settings.namespace!r} of this Ray cluster already: end that run, or "
                "choose another dataplane.ray.namespace"
            ) from error


async def run(topology: Topology, settings: RaySettings, timeout: float, channel: int) -> None:
    """Start the servers in the joined cluster, and keep them until stdin ends or SIGTERM comes. Raises Failure."""
    async with anyio.create_task_group() as tasks:
        launcher = RayLauncher(settings, tasks)
        tasks.start_soon(_until_told, tasks.cancel_scope)
        try:
            try:
                with anyio.fail_after(timeout):
                    spec = await launch_all(launcher, topology)
                    await launcher.hosts[CONTROLLER].publish.remote(msgspec.json.encode(spec).decode())
            except TimeoutError:
                raise Failure(_why_not_started(topology, settings, timeout)) from None
            os.write(channel, msgspec.json.encode(spec) + b"\n")
            await anyio.sleep_forever()
        finally:
            launcher.kill()


def find(settings: RaySettings) -> PlaneSpec:
    """The data plane that runs in the settings' namespace. Joins the cluster: blocks, for up to 30 s. Raises Failure."""
    join(settings)
    ray: Any = import_module("ray")
    try:
        controller = ray.get_actor(f"data plane: {CONTROLLER}")
    except ValueError:
        raise Failure(
            f"no data plane runs in namespace {settings.namespace!r} of the Ray cluster at {settings.address}"
        ) from None
    spec = ray.get(controller.spec.remote(), timeout=REACH_TIMEOUT_S)
    if spec is None:
        raise Failure("the data plane's servers are still being started")
    return msgspec.json.decode(spec, type=PlaneSpec)


def join(settings: RaySettings) -> None:
    """Become part of the cluster. Blocks, for up to 30 s. Raises Failure when there is none, or it does not let us in."""
    # Before Ray is imported, which reads it.
    os.environ.update(settings.environment())
    if problem := software.ray_problem():
        raise Failure(problem)
    ray: Any = import_module("ray")
    if settings.address != "auto":
        _reach(settings.address)
    try:
        ray.init(
            address=settings.address,
            namespace=settings.namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Failure(
            f"could not join the Ray cluster at {settings.address}: {error}. If it asks for a token, name its file "
            "(dataplane.ray.token_file); Python and Ray must have the versions that its nodes have"
        ) from error


def _reach(address: str) -> None:
    """Ray itself tries for more than a minute, and then ends the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_TIMEOUT_S).close()
    except OSError as error:
        raise Failure(f"no Ray cluster answers at {address}: {error}") from None


def _why_not_started(topology: Topology, settings: RaySettings, timeout: float) -> str:
    ray: Any = import_module("ray")
    wanted = topology.servers * settings.cpus_per_server
    free: float = ray.available_resources().get("CPU", 0)
    total: float = ray.cluster_resources().get("CPU", 0)
    what = f"{topology.servers} servers need {wanted:g} CPUs"
    if settings.resource:
        what += f", on nodes that have the resource {settings.resource!r}"
    return (
        f"the Ray cluster did not start the data plane's servers within {timeout:.0f} s: {what}; it has {total:g} CPUs, and "
        f"{free:g} of them are free now (dataplane.storage_units, dataplane.ray.cpus_per_server)"
    )


async def _until_told(scope: anyio.CancelScope) -> None:
    """Cancel `scope` when stdin ends or SIGTERM comes."""
    async with anyio.create_task_group() as tasks:

        async def stdin() -> None:
            while await anyio.to_thread.run_sync(partial(os.read, 0, 4096), abandon_on_cancel=True):
                pass
            scope.cancel()

        tasks.start_soon(stdin)
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                scope.cancel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--topology", required=True)
    parser.add_argument("--settings", required=True)
    parser.add_argument("--timeout", type=float, required=True)
    arguments = parser.parse_args()
    channel = handshake_channel()
    tq_settings.apply()
    topology = msgspec.json.decode(arguments.topology, type=Topology)
    settings = msgspec.json.decode(arguments.settings, type=RaySettings)
    code, deadline = 0, time.monotonic() + arguments.timeout - STOP_TIMEOUT_S
    try:
        join(settings)
        anyio.run(run, topology, settings, deadline - time.monotonic(), channel)
    except (Failure, ExceptionGroup) as error:
        first = first_error(error)
        if not isinstance(first, Failure):
            traceback.print_exception(first)
        sys.stderr.write(f"{first}\n")
        sys.stderr.flush()
        code = 1
    os._exit(code)  # the actors were killed; Ray's own farewell takes a second


if __name__ == "__main__":
    main()
