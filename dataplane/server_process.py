"""One data-plane server as a child process: started, greeted, listened to, and stopped within a bound."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import TypeVar

import anyio
import msgspec
from anyio.abc import ByteReceiveStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.text import TextReceiveStream

from dataplane.errors import DataPlaneDown

_log = logging.getLogger(__name__)

T = TypeVar("T")

PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])
_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**20)}
"""Rows that were cleared go back to the system. Without it glibc keeps for itself ever larger blocks that were freed."""
MAX_HELLO_BYTES = 64 * 1024
MAX_LINE = 2_000
LAST_LINES = 20
STOP_TIMEOUT_S = 3.0
"""From SIGTERM to SIGKILL, and from SIGKILL to giving up."""
DRAIN_TIMEOUT_S = 1.0


class ServerProcess:
    """A child in a process group of its own, so that a Ctrl-C at the terminal does not reach it.

    It ends when its stdin does, that is, with this process at the latest.
    """

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.greeted = False
        self.obituary = ""
        """How it ended, once it has."""
        self._process = process
        self._ended = anyio.Event()
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)

    @classmethod
    async def spawn(
        cls, name: str, module: str, arguments: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> ServerProcess:
        """Start `python -m MODULE ARGUMENTS`, with `env` besides this process's environment."""
        # -P and this path: our package is found wherever it is, and no file of the working directory shadows a library.
        path = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
        process = await anyio.open_process(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env={**_MEMORY, **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})},
            start_new_session=True,
        )
        return cls(name, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def __str__(self) -> str:
        return f"data-plane {self.name} (pid {self.pid})"

    async def hello(self, kind: type[T]) -> T:
        """Await the line in which it says where it serves. Needs `watch` running.

        Raises DataPlaneDown with its last words when it ends instead.
        """
        stdout = BufferedByteReceiveStream(_present(self._process.stdout))
        try:
            line = await stdout.receive_until(b"\n", MAX_HELLO_BYTES)
            said = msgspec.json.decode(line, type=kind)
        except anyio.IncompleteRead:
            await self._ended.wait()
            raise DataPlaneDown(f"{self.obituary} before it was ready{self.last_words()}") from None
        except (anyio.DelimiterNotFound, msgspec.DecodeError) as error:
            raise DataPlaneDown(f"{self} did not greet with its address: {error}") from error
        self.greeted = True
        return said

    async def watch(self) -> None:
        """Pass on what it prints to the log, until it has ended."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._drain)
            await self._process.wait()
            tasks.cancel_scope.deadline = anyio.current_time() + DRAIN_TIMEOUT_S
        code = self._process.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.obituary = f"{self} {how}"
        self._ended.set()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL, to the process group; each has 3 s."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)
            with anyio.move_on_after(STOP_TIMEOUT_S):
                await self._process.wait()
                break
        else:
            _log.error("%s could not be stopped", self)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                await stream.aclose()

    def last_words(self) -> str:
        """The last lines that it printed, as an error message's tail."""
        return "".join(f"\n  | {line}" for line in self._last_lines)

    async def _drain(self) -> None:
        rest = ""
        with contextlib.suppress(anyio.ClosedResourceError):  # stopped, while a child of its own still holds the pipe
            async for text in TextReceiveStream(_present(self._process.stderr), errors="replace"):
                *lines, rest = (rest + text)[-MAX_HELLO_BYTES:].split("\n")
                for line in lines:
                    self._hear(line)
        if rest:
            self._hear(rest)

    def _hear(self, line: str) -> None:
        self._last_lines.append(line[:MAX_LINE])
        _log.warning("%s: %s", self.name, line[:MAX_LINE])


def _present(stream: ByteReceiveStream | None) -> ByteReceiveStream:
    assert stream is not None, "the process was opened with pipes"
    return stream
