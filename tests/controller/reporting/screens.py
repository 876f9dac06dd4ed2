"""What the other end of a terminal or pipe receives."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import threading
from collections.abc import Generator
from contextlib import contextmanager


class Screen:
    """`fd` is where a program writes; `read()` is all that came out at the other end once the program is done with it.
    With `reading=False` nobody takes anything out, as when a terminal is stopped."""

    def __init__(self, fd: int, other_end: int, *, reading: bool = True) -> None:
        self.fd = fd
        self._other_end = other_end
        self._received = bytearray()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._closed = False
        if reading:
            self._thread.start()

    def read(self) -> str:
        self.close()
        if self._thread.ident is None:
            self._thread.start()
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()
        return self._received.decode()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self.fd)

    def _collect(self) -> None:
        try:
            while data := os.read(self._other_end, 1 << 16):
                self._received.extend(data)
        except OSError:  # A pty answers EIO when its last writer has closed it.
            return


@contextmanager
def piped(*, reading: bool = True) -> Generator[Screen]:
    reader, writer = os.pipe()
    screen = Screen(writer, reader, reading=reading)
    try:
        yield screen
    finally:
        screen.close()
        os.close(reader)


@contextmanager
def terminal(*, columns: int = 100, reading: bool = True) -> Generator[Screen]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    screen = Screen(slave, master, reading=reading)
    try:
        yield screen
    finally:
        screen.close()
        os.close(master)
