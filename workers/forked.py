"""Makes processes that a library forks from this one end with it, and hold nothing of its connections.

A forked process inherits every open file: a listening socket among them would stay bound after its owner's death, and a
connection would not end. It also inherits asyncio's wake-up pipe, through which a signal to the child would seem to have
been sent to its parent. Forking (rather than spawning) makes a second engine start in two seconds instead of ten.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

_OPEN_FILES = Path("/proc/self/fd")


class _Bond(threading.local):
    """Of the thread that forks; a forked process has it in its main thread, so its own forks are bound to it in turn."""

    bound: bool = False
    parent: int = 0
    settle: Callable[[], object] | None = None


_bond = _Bond()


@contextmanager
def bound_children(settle: Callable[[], object] | None = None) -> Generator[None]:
    """While inside, processes that this thread forks let go of the sockets they inherit, call `settle`, and are killed when
    their parent is gone, however it ended."""
    _bond.bound, _bond.settle = True, settle
    try:
        yield
    finally:
        _bond.bound, _bond.settle = False, None


def _note_parent() -> None:
    _bond.parent = os.getpid()


def _settle_in() -> None:
    if not _bond.bound:
        return
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    _close_sockets()
    if _bond.settle is not None:
        _bond.settle()
    threading.Thread(target=_end_with, args=(_bond.parent,), name="parent-watch", daemon=True).start()


def _close_sockets() -> None:
    """Their numbers stay taken, by /dev/null: an inherited object may close its number yet, and must not hit another's."""
    null = os.open(os.devnull, os.O_RDWR)
    for entry in _OPEN_FILES.iterdir():
        number = int(entry.name)
        with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed by now
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.dup2(null, number, inheritable=False)
    os.close(null)


def _end_with(parent: int) -> None:
    # A death signal (PR_SET_PDEATHSIG) would come when the forking thread ends, not its process.
    with contextlib.suppress(ProcessLookupError):
        poll = select.poll()
        poll.register(os.pidfd_open(parent), select.POLLIN)
        if os.getppid() == parent:
            poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


os.register_at_fork(before=_note_parent, after_in_child=_settle_in)
