"""One thread that all of the trainer's compute runs on, call by call, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import anyio
import torch

Result = TypeVar("Result")


class ComputeThread:
    """A thread with `threads` torch threads. It has to be one and the same: OpenMP keeps that number per calling thread."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="compute", initializer=partial(torch.set_num_threads, threads)
        )
        self._turn = anyio.CapacityLimiter(1)

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run `function` after those that were given earlier, and return or raise what it does.

        A cancellation withdraws it while it waits; once begun, it runs to its end before the cancellation is delivered.
        """
        async with self._turn:
            done = asyncio.wrap_future(self._executor.submit(function))
            with anyio.CancelScope(shield=True):
                await asyncio.wait((done,))
            return done.result()

    def close(self) -> None:
        """Take no more calls. Does not wait for a running one."""
        self._executor.shutdown(wait=False)
