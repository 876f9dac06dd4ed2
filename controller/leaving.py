"""The end of the process without clean-up, from any thread: after a second signal, or when the event loop is beyond help.

Worker processes see their lifeline break and end by themselves.
"""

from __future__ import annotations

import _thread
import logging
import os
import sys
import time
from contextlib import suppress
from typing import NoReturn

from workers.launch import remove_socket_folders

_LAST_WORDS_S = 5.0
"""A stopped terminal or a hung disk must not keep the process alive."""


def leave(code: int, message: str) -> NoReturn:
    """Say `message` on stderr and end the process with `code`, within a bound whatever hangs. Also in a signal handler."""
    leave_within(_LAST_WORDS_S, code)
    with suppress(OSError):
        os.write(2, f"{_show_cursor()}{message}\n".encode(errors="backslashreplace"))
    with suppress(OSError):
        remove_socket_folders()
    os._exit(code)


def leave_behind(code: int) -> NoReturn:
    """The last act of an orderly exit: what is alive goes with the process. The interpreter's own collections of it would
    take a second, and native code would list what they do not reach as its leaks, a screen full after a run's result."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # none, a closed pipe, or closed
            stream.flush()
    os._exit(code)


def leave_within(seconds: float, code: int) -> None:
    """End the process with `code` if it has not ended by then: held by a thread or a task that nothing can end."""
    # Not a `threading.Thread`: a signal handler may have interrupted one of that module's functions, with its lock held.
    _thread.start_new_thread(_exit_later, (seconds, code))


def _exit_later(seconds: float, code: int) -> None:
    time.sleep(seconds)
    os._exit(code)


def _show_cursor() -> str:
    return "\x1b[?25h\n" if sys.stdout is not None and sys.stdout.isatty() else "\n"
