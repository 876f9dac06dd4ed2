"""Code of the user's own, awaited so that it cannot hold up a run: soon after a cancellation it ends, or is left behind.

A coroutine that catches everything around an await, in a loop, swallows every cancellation; nothing in Python ends it. It is
then not resumed any more.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import anyio

from controller.sentinel.stacks import awaiting

logger = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_S = 5.0
"""From a cancellation to giving up on code that does not end."""

_MACHINERY = tuple(
    f"{Path(__file__).resolve().parents[1] / name}"
    for name in ("controller/", "ledger/", "workers/environments/offload.py")
)


def stands_at(coroutine: Coroutine[Any, Any, Any]) -> str:
    """The innermost place of it that is neither a library's nor the controller's; empty when it has not begun or is over."""
    stack = awaiting(coroutine)
    own = next((place for place in stack if not place.of_a_library and not place.file.startswith(_MACHINERY)), None)
    return str(own or (stack[0] if stack else ""))


async def await_foreign(
    coroutine: Coroutine[Any, Any, T], what: str, *, on_cancel: Callable[[], None], grace_s: float = GRACE_S
) -> T:
    """The result of `coroutine`, or its exception; it runs in a task of its own.

    A cancellation is passed on to it, once, after `on_cancel()`. When it has not ended `grace_s` later it is left
    where it stands, its `finally` clauses not run, and the cancellation goes on. `what` names it in the log.
    """
    driver = _Driver(coroutine)
    # Not a task group's: one cannot be left before its tasks have ended.
    task = asyncio.get_running_loop().create_task(driver.run(), name=what)
    try:
        await driver.ended.wait()
    except anyio.get_cancelled_exc_class():
        on_cancel()
        task.cancel()
        with anyio.move_on_after(grace_s, shield=True):
            await driver.ended.wait()
        if not driver.ended.is_set():
            logger.warning("%s did not end within %g s of its cancellation and was left behind", what, grace_s)
            driver.left = True
            # Kept even at the interpreter's end: there it would be closed, and what swallows that too never ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(coroutine))
            task.cancel()
        raise
    return driver.outcome()


class _Driver(Generic[T]):
    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self.left = False
        """End the task at its next cancellation, without resuming the coroutine."""
        self.ended = anyio.Event()
        self.outcome: Callable[[], T] = _cancelled_itself

    async def run(self) -> None:
        try:
            result = await self._steps()
            self.outcome = lambda: result
        except Exception as error:
            self.outcome = partial(_raise, error)
        except SystemExit as error:
            # It would take the loop along.
            self.outcome = partial(_raise, RuntimeError(f"it called sys.exit({error.code!r})"))
        finally:
            self.ended.set()

    @types.coroutine
    def _steps(self) -> Generator[Any, Any, T]:
        """As awaiting the coroutine, but for the way out."""
        step: Callable[[], Any] = partial(self._coroutine.send, None)
        try:
            while True:
                try:
                    waits_for = step()
                except StopIteration as done:
                    return done.value
                try:
                    step = partial(self._coroutine.send, (yield waits_for))
                except BaseException as error:
                    if self.left:
                        raise
                    step = partial(self._coroutine.throw, error)
        finally:
            del step  # It may hold the error that has this frame in its traceback.


def _cancelled_itself() -> Any:
    raise RuntimeError("it ended with a cancellation that nobody had asked for")


def _raise(error: Exception) -> Any:
    raise error
