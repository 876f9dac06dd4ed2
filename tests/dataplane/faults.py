"""Real faults: processes that stand still, and ones that are gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import anyio


@contextmanager
def frozen(*pids: int, at_most_s: float = 60) -> Generator[None]:
    """The processes stand still (SIGSTOP) for the length of the block, which may be stuck in them for `at_most_s`."""

    def thaw() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        while state(pid) not in "TZX":  # each of its threads stops at its own next chance
            time.sleep(0.001)
    timer = threading.Timer(at_most_s, thaw)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        thaw()


def serving(pid: int) -> int:
    """The process itself, or the program that it runs as its child, as it does with Mooncake's master."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else pid


def alive(pid: int) -> bool:
    return state(pid) not in "ZX"


def state(pid: int) -> str:
    """R, S, D, T (stopped), Z (dead, not yet waited for) or X (gone)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


async def gone(*pids: int) -> None:
    """Return when none of the processes is left."""
    with anyio.fail_after(20):
        while any(map(alive, pids)):
            await anyio.sleep(0.02)
