"""The worker process's side of its launch: `run_worker` is what `python -m <worker module>` calls.

A worker module holds:

    @asynccontextmanager
    async def serve(spec: GenerationSpec, server: RpcServer) -> AsyncGenerator[None]:
        service = await GenerationService.create(spec)  # blocking work in a thread
        server.register(GENERATE, service.generate)
        try:
            yield  # the server listens now
        finally:
            await service.aclose()

    def main() -> None:
        run_worker(GenerationSpec, serve)

The process never outlives its launcher: when stdin ends or the launcher's process is gone, it stops cleanly within
`GONE_GRACE_S` or is killed with its whole group by a thread that does not need the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import importlib.util
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from io import FileIO
from typing import Generic, NoReturn, TypeVar

import anyio
import msgspec
from msgspec import Struct

from workers.open_files import allow_many_connections
from workers.rpc.server import RpcServer, sole_error
from workers.rpc.wire import sendable
from workers.startup import MAX_LINE_BYTES, Assignment, Ready, StartFailed, encode_line

logger = logging.getLogger(__name__)

Spec = TypeVar("Spec", bound=Struct)
Serve = Callable[[Spec, RpcServer], AbstractAsyncContextManager[None]]

GONE_GRACE_S = 2.0
"""From the launcher's end to the worker's kill."""


class StartupError(Exception):
    """Raised by `serve` before it yields: the launcher shows message and remedy, without a traceback."""

    def __init__(self, kind: str, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.remedy = remedy


def run_worker(spec_type: type[Spec], serve: Serve[Spec]) -> NoReturn:
    """Serve until the launcher says stop (SIGTERM) or is gone, then exit the process.

    `serve(spec, server)` is entered on the event loop; it registers its handlers and yields; the process then listens
    and reports ready. On a stop the running handlers are cancelled first, then `serve` is left normally (no exception is
    thrown at its yield). A stop before the yield cancels `serve`. When what runs inside `serve` fails, the traceback goes
    to stderr and the process exits with 1. SIGUSR1 prints the stack of every thread.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # A thread that holds the GIL in Python code delays the loop by one interval; the default is 5 ms.
    sys.setswitchinterval(0.001)
    allow_many_connections()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    assignment = _read_assignment()
    os.set_inheritable(assignment.report_fd, False)
    uvloop = importlib.util.find_spec("uvloop") is not None
    lifeline = _Lifeline(assignment.launcher_pid, assignment.folder)

    async def live() -> int:
        return await _Host(assignment, spec_type, serve, lifeline).run()

    status = anyio.run(live, backend_options={"use_uvloop": uvloop})
    logging.shutdown()
    sys.stdout.flush()
    if lifeline.launcher_gone:
        lifeline.end_process()
    # Not sys.exit: joining a thread that hangs in native code would keep the process, and its memory, until it is killed.
    os._exit(status)


class _Host(Generic[Spec]):
    """One worker's life on the event loop."""

    def __init__(self, assignment: Assignment, spec_type: type[Spec], serve: Serve[Spec], lifeline: _Lifeline) -> None:
        self._assignment = assignment
        self._spec_type = spec_type
        self._serve = serve
        self._reported = False
        self._starting = anyio.CancelScope()
        self._running = anyio.CancelScope()
        self._lifeline = lifeline

    async def run(self) -> int:
        """The process's exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        self._lifeline.start(on_gone=partial(loop.call_soon_threadsafe, self._stop))
        try:
            await self._run()
        except Exception as raised:
            error = sole_error(raised)
            if not isinstance(error, StartupError):
                logger.exception("worker %s failed", self._assignment.name)
                error = StartupError(type(error).__name__, str(error))
            if not self._reported:
                # Cut, so that it fits into the pipe (64 KiB) and writing it cannot block.
                message, remedy = sendable(error.message), sendable(error.remedy)
                self._report(StartFailed(kind=error.kind, message=message, remedy=remedy))
            return 1
        return 0

    async def _run(self) -> None:
        spec = self._decode_spec()
        server = RpcServer(self._assignment.name)
        with self._starting:
            async with self._serve(spec, server):
                with self._running:
                    async with anyio.create_task_group() as tasks:
                        address = await tasks.start(server.serve, self._assignment.address, self._assignment.token)
                        # What start-up left (modules, weights) stays: without it a full collection is short.
                        gc.freeze()
                        self._report(Ready(address=address))

    def _decode_spec(self) -> Spec:
        try:
            return msgspec.json.decode(self._assignment.spec, type=self._spec_type)
        except msgspec.MsgspecError as error:
            raise StartupError("bad_spec", f"the spec is not a {self._spec_type.__name__}: {error}") from error

    def _stop(self) -> None:
        """Before readiness there is nothing to leave in order; after it, `serve` is left without a cancellation."""
        (self._running if self._reported else self._starting).cancel()

    def _report(self, message: Ready | StartFailed) -> None:
        self._reported = True
        with contextlib.suppress(BrokenPipeError), FileIO(self._assignment.report_fd, "wb") as report:
            report.write(encode_line(message))


class _Lifeline:
    """Ends the process with its launcher.

    Two signs, since either can fail alone: stdin's end (which a process that the launcher forked may hold off) and the
    end of the launcher's process (which only Linux shows).
    """

    def __init__(self, launcher_pid: int, folder: str) -> None:
        self._launcher_pid = launcher_pid
        self._folder = folder
        self.launcher_gone = False

    def start(self, *, on_gone: Callable[[], object]) -> None:
        threading.Thread(target=self._watch, args=(on_gone,), name="lifeline", daemon=True).start()

    def _watch(self, on_gone: Callable[[], object]) -> None:
        self._wait()
        self.launcher_gone = True
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            on_gone()
        time.sleep(GONE_GRACE_S)
        self.end_process()

    def end_process(self) -> NoReturn:
        """Do what the launcher can no longer do: remove the socket's folder, and kill all that this process started."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(0, select.POLLIN)
        if hasattr(os, "pidfd_open"):
            try:
                poll.register(os.pidfd_open(self._launcher_pid), select.POLLIN)
            except ProcessLookupError:
                return
            if os.getppid() != self._launcher_pid:
                return
        while True:
            for fd, _ in poll.poll():
                if fd != 0 or not os.read(0, 65536):
                    return


def _read_assignment() -> Assignment:
    line = b""
    while not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES:
        part = os.read(0, 65536)
        if not part:
            break
        line += part
    try:
        return msgspec.json.decode(line, type=Assignment)
    except msgspec.MsgspecError as error:
        sys.exit(f"a worker is started by its launcher, which writes its assignment to stdin: {error}")
