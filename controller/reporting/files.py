"""File primitives that either do all of what they say or raise `OSError`. They block: call them in a thread."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_all(fd: int, data: bytes) -> None:
    """Writes every byte of `data`; `os.write` alone may stop short."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class AppendFile:
    """A file opened for appending, without a user-space buffer, so that nothing is left to fail when it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes) -> None:
        if self._fd is None:
            raise ValueError(f"{self.path} is not open")
        write_all(self._fd, data)

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Atomic and durable: after a crash at any point `path` holds its old content or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
