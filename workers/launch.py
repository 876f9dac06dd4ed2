"""Starts worker processes on this machine and sees to it that none outlives its `async with`.

Each worker is launched in a task of its own, so that several start at once:

    async def supervise(name: str, *, task_status: TaskStatus[WorkerProcess]) -> None:
        async with launch("workers.generation", name=name, spec=spec) as worker:
            task_status.started(worker)
            await worker.watch()
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NoReturn

from msgspec import Struct

from workers.rpc.client import RpcClient


class LaunchError(Exception):
    """A worker did not become ready; the text is one clear message with its last log lines.

    `kind` is "died" (it exited), "not_ready" (no readiness in time), or what the worker itself reported
    (`StartupError.kind`, or an exception's class name).
    """

    def __init__(self, name: str, kind: str, message: str, *, remedy: str, log: tuple[str, ...]) -> None:
        raise NotImplementedError


class WorkerDied(Exception):
    """A worker that was serving has exited. `status` as in subprocess: an exit code, or minus a signal."""

    def __init__(self, name: str, status: int, *, log: tuple[str, ...]) -> None:
        raise NotImplementedError


class WorkerProcess:
    """A worker that reported ready."""

    name: str
    pid: int
    client: RpcClient
    """Closed when the launch scope is left."""

    async def wait(self) -> int:
        """Return the exit status (as in subprocess) once the process has exited."""
        raise NotImplementedError

    async def watch(self) -> NoReturn:
        """Raise `WorkerDied` when the process exits."""
        raise NotImplementedError


@asynccontextmanager
async def launch(
    module: str,
    *,
    name: str,
    spec: Struct,
    start_timeout_s: float = 180.0,
    stop_timeout_s: float = 10.0,
    on_line: Callable[[str, str], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> AsyncGenerator[WorkerProcess]:
    """Start `python -m module`, wait until it is ready, and stop it on leaving.

    `spec` reaches it over stdin. `on_line(name, line)` gets each line it prints (default: the logger "worker.<name>");
    `env` is added to this process's environment. Raises `LaunchError` when it does not become ready within
    `start_timeout_s`. Leaving sends SIGTERM and, after `stop_timeout_s`, SIGKILL to its whole process group; this is
    shielded from cancellation, and no process of the group is left.
    """
    raise NotImplementedError
    yield
