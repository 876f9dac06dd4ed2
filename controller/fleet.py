"""The run's worker processes: started together, watched while the run lasts, stopped together.

Invariant: when `stop` returns, or the scope is left, no worker process is alive. A worker of `start` that dies earlier ends
the scope with its `WorkerDied`; one of `start_replaceable` can be started anew.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
from anyio.abc import TaskGroup, TaskStatus
from msgspec import Struct

from controller.config.schema import WorkersConfig
from controller.deaths import Deaths
from workers.launch import WorkerDied, WorkerProcess, launch
from workers.rpc.client import RpcClient


class ReplaceableWorker:
    """A worker whose process may die, or be ended, and be started anew: at another address, with nothing kept."""

    def __init__(
        self,
        name: str,
        start: Callable[[], AbstractAsyncContextManager[WorkerProcess]],
        tasks: TaskGroup,
        stop: anyio.Event,
    ) -> None:
        """`start` launches a process for as long as its scope; it runs in `tasks`, until `stop` is set."""
        self.name = name
        self._start = start
        self._tasks = tasks
        self._stop = stop
        self._worker: WorkerProcess | None = None
        self._gone = anyio.Event()
        self._gone.set()
        self._epitaph = ""

    @property
    def alive(self) -> bool:
        return not self._gone.is_set()

    @property
    def pid(self) -> int:
        """Of the present process."""
        return self._present.pid

    @property
    def client(self) -> RpcClient:
        """Reaches the present process; closed when that is gone."""
        return self._present.client

    async def start(self) -> None:
        """Start a process and return once it is ready, the one before being gone. Raises LaunchError.

        A cancellation leaves none.
        """
        await self._gone.wait()
        await self._tasks.start(self._live)

    async def end(self) -> None:
        """Kill the process, whatever it is doing, and return when it is gone."""
        if self._worker is not None:
            self._worker.kill()
        await self._gone.wait()

    async def died(self) -> str:
        """Wait for the end of the process; how it ended."""
        await self._gone.wait()
        return self._epitaph

    @property
    def _present(self) -> WorkerProcess:
        if self._worker is None:
            raise RuntimeError(f"worker {self.name} has no process")
        return self._worker

    async def _live(self, *, task_status: TaskStatus[None]) -> None:
        self._gone = anyio.Event()
        self._epitaph = f"worker {self.name} did not start"
        try:
            async with self._start() as worker:
                self._worker = worker
                task_status.started()
                async with anyio.create_task_group() as tg:
                    tg.start_soon(self._note_death, worker, tg.cancel_scope)
                    await self._stop.wait()
                    tg.cancel_scope.cancel()
        finally:
            self._worker = None
            self._gone.set()

    async def _note_death(self, worker: WorkerProcess, scope: anyio.CancelScope) -> None:
        try:
            await worker.watch()
        except WorkerDied as death:
            self._epitaph = str(death)
            scope.cancel()


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
        self._stopped: set[anyio.Event] = set()
        self.pids: list[int] = []
        """Of all processes that there were."""
        self.processes: dict[str, int] = {}
        """Ids of those that run, by their workers' names."""

    async def start(self, module: str, *, name: str, spec: Struct) -> WorkerProcess:
        """Start `python -m module` and return once it is ready. Raises LaunchError."""
        return await self._tasks.start(self._supervise, module, name, spec)

    async def start_replaceable(self, module: str, *, name: str, spec: Struct) -> ReplaceableWorker:
        """Likewise; its death is its user's affair."""
        worker = ReplaceableWorker(name, lambda: self._launch(module, name, spec), self._tasks, self._stop)
        await worker.start()
        return worker

    async def stop(self) -> None:
        """Stop all workers and return when they are gone (bounded by `workers.stop_timeout_s`). Idempotent."""
        self._stop.set()
        for stopped in tuple(self._stopped):
            await stopped.wait()

    @asynccontextmanager
    async def _launch(self, module: str, name: str, spec: Struct) -> AsyncGenerator[WorkerProcess]:
        stopped = anyio.Event()
        self._stopped.add(stopped)
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
                self.processes[name] = worker.pid
                yield worker
        finally:
            self.processes.pop(name, None)
            self._stopped.discard(stopped)
            stopped.set()

    async def _supervise(self, module: str, name: str, spec: Struct, *, task_status: TaskStatus[WorkerProcess]) -> None:
        async with self._launch(module, name, spec) as worker:
            task_status.started(worker)
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
