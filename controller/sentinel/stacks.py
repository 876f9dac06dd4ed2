"""Stacks as text: of a thread, of all threads, of all tasks of a loop. Safe to take from another thread."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

_LIBRARIES = tuple(
    {f"{Path(sysconfig.get_path(name))}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"<frozen "}
)
_MAX_FRAMES = 60


class Place(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def of_a_library(self) -> bool:
        return self.file.startswith(_LIBRARIES)


def stack_of(frame: FrameType | None) -> tuple[Place, ...]:
    """Innermost first."""
    found: list[Place] = []
    while frame is not None and len(found) < _MAX_FRAMES:
        code = frame.f_code
        found.append(Place(code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_qualname))
        frame = frame.f_back
    return tuple(found)


def thread_stack(ident: int) -> tuple[Place, ...]:
    return stack_of(sys._current_frames().get(ident))  # pyright: ignore[reportPrivateUsage]


def thread_stacks() -> dict[int, tuple[Place, ...]]:
    """Of all threads, by their idents."""
    return {ident: stack_of(frame) for ident, frame in sys._current_frames().items()}  # pyright: ignore[reportPrivateUsage]


def culprit_of(stack: tuple[Place, ...]) -> str:
    """The innermost place outside of the standard library and installed packages, and what it had called."""
    if not stack:
        return "unknown"
    own = next((place for place in stack if not place.of_a_library), stack[0])
    return str(own) if own is stack[0] else f"{own} (in {stack[0]})"


def waits_for_events(stack: tuple[Place, ...]) -> bool:
    """Whether this is a loop's thread that runs no callback: asyncio's is in its selector, uvloop's in no Python code."""
    if not stack:
        return False
    innermost = stack[0]
    return innermost.function.endswith(("Selector.select", "Runner.run")) and innermost.of_a_library


def describe(stack: tuple[Place, ...]) -> str:
    return "\n".join(f"    {place}" for place in stack)


def dump(loop: asyncio.AbstractEventLoop | None) -> str:
    """All tasks of the loop and all threads of the process."""
    return "\n".join([*(_tasks(loop) if loop else ()), *_threads()])


def _threads() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        yield f"thread {names.get(ident, ident)}:\n{describe(stack_of(frame))}"


def _tasks(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    tasks: set[asyncio.Task[Any]] = set()
    for _ in range(10):
        # The set of tasks may change while it is read from outside of the loop.
        with suppress(RuntimeError):
            tasks = asyncio.all_tasks(loop)
            break
    yield f"{len(tasks)} tasks"
    for task in tasks:
        yield f"task {task.get_name()}:\n{describe(awaiting(task.get_coro()))}"


def awaiting(coroutine: Any) -> tuple[Place, ...]:
    """Where a coroutine stands, innermost first: the chain of those that await one another."""
    found: list[Place] = []
    inner: Any = coroutine
    while inner is not None and len(found) < _MAX_FRAMES:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None)
        if frame is not None:
            found.append(Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
    return tuple(reversed(found))
