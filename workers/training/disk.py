"""Files that must be whole: enough space before writing, a clear error when it still runs out, fsync, digests."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from workers.training.errors import NoSpace

MARGIN = 1 << 20
"""Bytes for headers and metadata."""


@contextmanager
def space_for(folder: Path, need: int) -> Generator[None]:
    """Write about `need` bytes to `folder` inside. Raises NoSpace, naming both, when they are not free or run out."""
    free = shutil.disk_usage(folder).free
    if free < need + MARGIN:
        raise NoSpace(f"{folder}: {need + MARGIN} bytes are needed, {free} are free")
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise NoSpace(f"{folder} ran full while {need} bytes were written") from error
        raise
    except SafetensorError as error:
        # safetensors reports a failed write as its own error, with the errno in the text.
        if f"os error {errno.ENOSPC}" in str(error):
            raise NoSpace(f"{folder} ran full while {need} bytes were written") from error
        raise OSError(f"{folder}: {error}") from error


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush a folder and all that is in it."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
