"""Why an engine core failed, in its own words: what its parent gets to know is only that it did.

A core and the workers that it forks share a page of memory with the process that it was forked from. The first error that
vLLM logs in them with a traceback is written into it: what comes after follows from that.
"""

from __future__ import annotations

import logging
import mmap

_PAGE_BYTES = 4096
_LOGGERS = "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor"
_FAILED_CALL = "Invocation of"
"""How vLLM begins the record of a call that failed: its caller is told, and the core goes on."""


class Cause(logging.Filter):
    """Make one before the fork, and `listen` in the forked process."""

    def __init__(self) -> None:
        super().__init__()
        self._page = mmap.mmap(-1, _PAGE_BYTES)

    def listen(self) -> None:
        """As a filter that lets everything pass: a core configures its logging once more, which removes handlers."""
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info and record.exc_info[1]
        if error and not self.text and not record.msg.startswith(_FAILED_CALL):
            told = f"{type(error).__name__}: {error}".replace("\0", "").encode(errors="replace")[:_PAGE_BYTES]
            self._page[: len(told)] = told
        return True

    @property
    def text(self) -> str:
        """The error's type and message; empty when none was logged."""
        return self._page[:].rstrip(b"\0").decode(errors="ignore")
