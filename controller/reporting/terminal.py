"""Standard output as an unbuffered text file of our own.

Python's own `sys.stdout` is flushed when the interpreter exits and shares a lock with every `print`: a thread stuck in it
(a stopped terminal, a pager that does not read) would hang or abort the exit, and a broken pipe would be reported twice.
"""

from __future__ import annotations

import io
import os
import sys

from controller.reporting.files import write_all


class Terminal(io.TextIOBase):
    """Text for the file descriptor `fd`, written out by `flush`. Characters that `encoding` lacks are replaced."""

    def __init__(self, fd: int = 1, encoding: str | None = None) -> None:
        self._fd = fd
        self._encoding = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"
        self._pending: list[str] = []

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._encoding

    @property
    def unicode(self) -> bool:
        return self._encoding.lower().startswith("utf")

    @property
    def live(self) -> bool:
        """Whether the cursor can be moved: a terminal that is not a dumb one."""
        return self.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self._pending.append(text)
        return len(text)

    def flush(self) -> None:
        """Blocks as long as the terminal does. Raises `OSError` when it has gone; the text is then discarded."""
        data = "".join(self._pending).encode(self._encoding, "replace")
        self._pending.clear()
        if data:
            write_all(self._fd, data)
