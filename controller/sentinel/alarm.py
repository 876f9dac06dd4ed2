"""The kernel's alarm for native code that keeps the interpreter: no Python thread gets a turn then, nor the sentinel."""

from __future__ import annotations

import faulthandler
import signal


def set_alarm() -> bool:
    """Have the kernel end the process, after all stacks were written to stderr, when the sentinel cannot run for a long time
    of computing: native code that keeps the interpreter. The timer counts CPU time, so it does not run in a stopped process.
    """
    if signal.getsignal(signal.SIGPROF) is not signal.SIG_DFL:
        return False  # A profiler's.
    faulthandler.register(signal.SIGPROF, file=2, all_threads=True, chain=True)
    return True


def clear_alarm() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    faulthandler.unregister(signal.SIGPROF)
