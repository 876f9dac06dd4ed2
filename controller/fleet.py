"""The run's worker processes: started together, watched while the run lasts, stopped together.

Invariant: when `stop` returns, or the scope is left, no worker process is alive. A worker that dies earlier ends the scope
with its `WorkerDied`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup, TaskStatus
from msgspec import Struct

from controller.config.schema import WorkersConfig
from controller.deaths import Deaths
from workers.launch import WorkerProcess, launch


class Fleet:
    """Use `async with open_fleet(...)`."""

    def __init__(
        self, tasks: TaskGroup, config: WorkersConfig, deaths: Deaths, on_line: Callable[[str, str], None]
    ) -> None:
        self._tasks = tasks
        self._config = config
        self._deaths = deaths
        self._on_line = on_line
        self._stop = anyio.Event()
        self._stopped: list[anyio.Event] = []
        self.pids: list[int] = []

    async def start(self, module: str, *, name: str, spec: Struct) -> WorkerProcess:
        """Start `python -m module` and return once it is ready. Raises LaunchError."""
        return await self._tasks.start(self._supervise, module, name, spec)

    async def stop(self) -> None:
        """Stop all workers and return when they are gone (bounded by `workers.stop_timeout_s`). Idempotent."""
        self._stop.set()
        for stopped in self._stopped:
            await stopped.wait()

    async def _supervise(self, module: str, name: str, spec: Struct, *, task_status: TaskStatus[WorkerProcess]) -> None:
        stopped = anyio.Event()
        self._stopped.append(stopped)
        try:
            async with launch(
                module,
                name=name,
                spec=spec,
                start_timeout_s=self._config.start_timeout_s,
                stop_timeout_s=self._config.stop_timeout_s,
                on_line=self._on_line,
            ) as worker:
                self.pids.append(worker.pid)
                task_status.started(worker)
                await self._watch(worker)
        finally:
            stopped.set()

    async def _watch(self, worker: WorkerProcess) -> None:
        async with anyio.create_task_group() as tg:
            tg.start_soon(self._deaths.watch, worker.watch)
            await self._stop.wait()
            tg.cancel_scope.cancel()


@asynccontextmanager
async def open_fleet(
    config: WorkersConfig, deaths: Deaths, on_line: Callable[[str, str], None]
) -> AsyncGenerator[Fleet]:
    """A fleet whose workers are stopped when the scope is left, however it is left."""
    async with anyio.create_task_group() as tasks:
        fleet = Fleet(tasks, config, deaths, on_line)
        try:
            yield fleet
        finally:
            with anyio.CancelScope(shield=True):
                await fleet.stop()
