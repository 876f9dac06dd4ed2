"""A coroutine beside a body that outlives the body's cancellation, so that it can still report how the body ended."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from anyio import CancelScope, create_task_group


@asynccontextmanager
async def background(run: Callable[[], Awaitable[None]], stop: Callable[[], None]) -> AsyncGenerator[None]:
    """Runs `run()` beside the body; when the body ends, however it ends, calls `stop()` and waits for `run()` to return.

    The body's cancellation does not reach `run`, so `run` must bound what it still does after `stop`. If `run` raises,
    the body is cancelled. The error that came first leaves as itself, not in an exception group; one that came second
    is a note on it.
    """
    failure: Exception | None = None
    error: Exception | None = None

    async def guarded() -> None:
        nonlocal failure
        try:
            with CancelScope(shield=True):
                await run()
        except Exception as raised:
            failure = raised
            if error is None:
                tasks.cancel_scope.cancel()
            else:
                error.add_note(f"Then: {raised!r}")

    try:
        async with create_task_group() as tasks:
            tasks.start_soon(guarded)
            try:
                yield
            except Exception as raised:
                if failure is None:
                    error = raised
                else:
                    failure.add_note(f"Then: {raised!r}")
            finally:
                stop()
    finally:
        if failure is not None and error is None:
            raise failure
    if error is not None:
        raise error
