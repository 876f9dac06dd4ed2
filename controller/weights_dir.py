"""The folder through which weights pass from trainer to engines: private to the run, gone after it.

A run that was killed leaves its folder in shared memory; the next run on the machine removes it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from controller.locks import try_lock

_PREFIX = "monoloop-weights-"
_LOCK = "lock"


@contextmanager
def open_weights_dir(root: Path) -> Generator[Path]:
    """A new folder below `root`. Blocking (file I/O)."""
    for stale in root.glob(f"{_PREFIX}*/{_LOCK}"):
        _remove_if_unused(stale)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    try:
        with try_lock(folder / _LOCK):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_unused(lock: Path) -> None:
    try:
        with try_lock(lock) as unused:
            if unused:
                shutil.rmtree(lock.parent, ignore_errors=True)
    except OSError:
        # Another user's, or removed by another run meanwhile.
        return
