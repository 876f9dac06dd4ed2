"""Files that say how to reach a run while it lasts: they are their owner's, appear whole, and go with the run."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec


@contextmanager
def private_file(path: Path, content: Any) -> Generator[None]:
    """Keep `content` as JSON in a file that only its owner may read, while inside. Blocking."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.unlink(missing_ok=True)
    file = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(file, "wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    unfinished.rename(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
