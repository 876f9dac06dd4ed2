"""A task group that ends its tasks one after the other: thousands of rollouts that are cancelled at once keep the loop for
seconds.

anyio delivers a cancellation to every task below a scope in one turn of the loop, and looks at all that are left whenever
one of them has ended. Here each task has a scope of its own, without a cancelled one above it, and a turn of the loop for
its cancellation. It ends there without an error, too: anyio keeps that of a cancelled task in a cycle, with all of its
frames, and the collector finds those of thousands in one go.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVarTuple

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup, TaskStatus

Args = TypeVarTuple("Args")


class GradualTaskGroup:
    """Use `gradual_task_group`. An error of a task is raised in `outer`."""

    def __init__(self, outer: TaskGroup) -> None:
        self._outer = outer
        self._tasks: TaskGroup
        self._running: dict[anyio.CancelScope, None] = {}
        self._one_ended = anyio.Event()
        self._over = anyio.Event()

    def start_soon(self, function: Callable[[*Args], Awaitable[None]], *args: *Args) -> None:
        scope = anyio.CancelScope()
        self._running[scope] = None
        self._tasks.start_soon(self._run, scope, function, args, name=function.__qualname__)

    async def host(self, *, task_status: TaskStatus[None]) -> None:
        """Where the tasks live until the group is `over`; no cancellation gets here from outside."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as self._tasks:
                task_status.started()
                await self._over.wait()

    async def ended(self) -> None:
        """Return when no task is left."""
        while self._running:
            self._one_ended = anyio.Event()
            await self._one_ended.wait()

    async def cancel(self) -> None:
        """All that run now. Each is told so in a turn of its own; how long it takes to end is not waited for."""
        for scope in tuple(self._running):
            scope.cancel()
            await anyio.lowlevel.checkpoint()

    def over(self) -> None:
        """No task is started any more."""
        self._over.set()

    async def _run(
        self, scope: anyio.CancelScope, function: Callable[[*Args], Awaitable[None]], args: tuple[*Args]
    ) -> None:
        try:
            with scope:
                await function(*args)
        except Exception as error:
            self._outer.start_soon(_raise, error)
        finally:
            del self._running[scope]
            self._one_ended.set()


@asynccontextmanager
async def gradual_task_group() -> AsyncGenerator[GradualTaskGroup]:
    """As anyio's task group: left when all tasks have ended, and ended by a cancellation, or an error of a task or the
    body, but gradually."""
    async with anyio.create_task_group() as outer:
        group = GradualTaskGroup(outer)
        await outer.start(group.host)
        try:
            yield group
            await group.ended()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await group.cancel()
            raise
        finally:
            group.over()


async def _raise(error: Exception) -> None:
    raise error
