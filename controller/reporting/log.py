"""The controller's log: `logging` records of every thread, written to controller.log by a thread of their own.

That thread does not need the event loop, so the log goes on when the loop hangs. Warnings are also handed to the display.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from queue import SimpleQueue

from anyio import CancelScope, move_on_after

from controller.reporting.daemon import DaemonThread
from controller.reporting.files import AppendFile

LOG_FILE = "controller.log"


@asynccontextmanager
async def logging_to(
    run_dir: Path,
    show: Callable[[str], None],
    *,
    level: int = logging.INFO,
    close_timeout_s: float = 5.0,
) -> AsyncGenerator[None]:
    """Within the body, log records of `level` and above are appended to controller.log; `logging` calls never wait for it.

    `show` gets one line for each warning or error, from the log's thread. Python warnings are logged too. A log that
    cannot be opened raises `OSError`. One that cannot be written later is told to `show`, once, and given up. On leaving,
    everything logged is in the file, within `close_timeout_s`.
    """
    thread = DaemonThread("log file")
    file = _LogFile(AppendFile(run_dir / LOG_FILE), show)
    listener = QueueListener(SimpleQueue(), file, _Warnings(show), respect_handler_level=True)
    handler = QueueHandler(listener.queue)
    root = logging.getLogger()
    level_before = root.level
    try:
        await thread.call(file.open)
        listener.start()
        root.addHandler(handler)
        root.setLevel(level)
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            root.setLevel(level_before)
            root.removeHandler(handler)
            with CancelScope(shield=True), move_on_after(close_timeout_s):
                await thread.call(listener.stop)
                await thread.call(file.close)
    finally:
        thread.close()


class _LogFile(logging.Handler):
    def __init__(self, file: AppendFile, show: Callable[[str], None]) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
        self._file = file
        self._show = show
        self._failed = False

    def open(self) -> None:
        self._file.open()

    def emit(self, record: logging.LogRecord) -> None:
        if self._failed:
            return
        try:
            self._file.write((self.format(record) + "\n").encode("utf-8", "backslashreplace"))
        except OSError as error:
            self._failed = True
            self._show(f"the log ends here, {self._file.path} cannot be written: {error}")

    def close(self) -> None:
        self._file.close()
        super().close()


class _Warnings(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        first_line = record.getMessage().split("\n", 1)[0]
        self._show(f"{record.name}: {first_line}")
