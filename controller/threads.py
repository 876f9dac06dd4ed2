"""Blocking context managers, entered and left in a thread."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


@asynccontextmanager
async def in_thread(manager: AbstractContextManager[T]) -> AsyncGenerator[T]:
    """Hold `manager` inside. A cancellation while it is entered or left takes effect after that."""
    entered: list[T] = []
    with anyio.CancelScope(shield=True):
        entered.append(await anyio.to_thread.run_sync(manager.__enter__))
    try:
        yield entered[0]
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(manager.__exit__, None, None, None)
