"""What a thread did with its time, by the kernel's account: computed, waited for a CPU, or neither.

With these a loop that is blocked is told from a process that was stopped, or that the machine gave no CPU.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


class ThreadClock:
    """CPU time of one thread of this process, and its wait for a CPU. Usable from any thread, while the thread lives."""

    def __init__(self, thread: threading.Thread) -> None:
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._fd: int | None = None
        with suppress(OSError):  # A kernel without it: waits for a CPU are then not told apart.
            self._fd = os.open(f"/proc/self/task/{thread.native_id}/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def cpu_s(self) -> float:
        return time.clock_gettime(self._clock)

    def waited_s(self) -> float:
        """Seconds that the thread was ready to run and had no CPU."""
        if self._fd is None:
            return 0.0
        return int(os.pread(self._fd, 128, 0).split()[1]) / 1e9

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@dataclass(frozen=True)
class Slice:
    """One turn of the sentinel, in seconds: it asked to be woken after `asked`, and was after `elapsed`."""

    asked: float
    elapsed: float
    loop_cpu: float
    """CPU time of the loop's thread."""
    loop_waited: float
    """The loop's thread was ready and had no CPU."""
    others_cpu: float
    """CPU time of the process's other threads: one of them may have kept the interpreter."""

    @property
    def late(self) -> bool:
        """The sentinel itself could not run when it wanted to."""
        return self.elapsed - self.asked > _LATE_S


_LATE_S = 0.01


def blocked_s(turn: Slice) -> float:
    """How much of the turn the loop's own code is answerable for.

    Not the time in which the loop's thread had no CPU. Nor that in which the sentinel could not run either, unless a thread
    of this process computed meanwhile (and so kept the interpreter): then the process was stopped, or starved.
    """
    excused = turn.loop_waited
    if turn.late:
        excused = max(excused, turn.elapsed - turn.asked - max(turn.loop_cpu, turn.others_cpu))
    return max(0.0, turn.elapsed - excused)


class Clocks:
    """The sentinel's turns, with what the process's threads did in each."""

    def __init__(self, loop_thread: threading.Thread) -> None:
        self._loop = ThreadClock(loop_thread)
        self._began = time.monotonic()
        self._cpu, self._waited, self._process = self._loop.cpu_s(), self._loop.waited_s(), time.process_time()

    def turn(self, asked: float) -> Slice:
        """What happened since the last call; the sentinel had meant to sleep for `asked` seconds."""
        now = time.monotonic()
        cpu, waited, process = self._loop.cpu_s(), self._loop.waited_s(), time.process_time()
        turn = Slice(
            asked=asked,
            elapsed=now - self._began,
            loop_cpu=cpu - self._cpu,
            loop_waited=waited - self._waited,
            others_cpu=process - self._process - (cpu - self._cpu),
        )
        self._began, self._cpu, self._waited, self._process = now, cpu, waited, process
        return turn

    def close(self) -> None:
        self._loop.close()


class OtherThreads:
    """Which of the process's threads computed most of late."""

    def __init__(self) -> None:
        self._before = _cpu_by_thread()

    def rebase(self) -> None:
        """Count from here."""
        self._before = _cpu_by_thread()

    def busiest(self, *, besides: set[int | None]) -> threading.Thread | None:
        """The one that had most CPU time since then; None when none had any."""
        used = {
            thread: cpu - self._before.get(thread, 0.0)
            for thread, cpu in _cpu_by_thread().items()
            if thread.ident not in besides
        }
        thread = max(used, key=lambda t: used[t], default=None)
        return thread if thread is not None and used[thread] > 0 else None


def _cpu_by_thread() -> dict[threading.Thread, float]:
    found: dict[threading.Thread, float] = {}
    for thread in threading.enumerate():
        # It may have ended meanwhile; its pthread clock would then be another's, or nobody's.
        with suppress(OSError, ValueError, IndexError):
            found[thread] = int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
    return found
