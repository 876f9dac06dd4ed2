"""Starts worker processes on this machine and sees to it that none outlives its `async with`.

Each worker is launched in a task of its own, so that several start at once:

    async def supervise(name: str, *, task_status: TaskStatus[WorkerProcess]) -> None:
        async with launch("workers.generation", name=name, spec=spec) as worker:
            task_status.started(worker)
            await worker.watch()
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NoReturn

import anyio
import anyio.to_thread
import msgspec
from msgspec import Struct

from workers.process import ChildProcess, child_process
from workers.rpc.client import RpcClient
from workers.startup import MAX_LINE_BYTES, Assignment, Ready, StartFailed, encode_line

_MAX_FOLDER_BYTES = 100
"""A unix socket's path has at most 107 bytes."""
_CLOSE_S = 2.0

_DEATHS = {
    0: "it ended by itself, as after a SIGTERM from elsewhere",
    -signal.SIGKILL: "killed from outside, most often by the kernel for want of memory (see dmesg): give it less to hold",
    -signal.SIGSEGV: "native code crashed; the stacks among its last lines say where",
    -signal.SIGABRT: "native code gave up; its last lines say why",
}


class LaunchError(Exception):
    """A worker did not become ready.

    `kind` is "died" (it exited), "not_ready" (no readiness in time), "bad_report" (what it reported cannot be read), or
    what the worker itself reported (`StartupError.kind`, or an exception's class name). `log` is its last lines.
    """

    def __init__(self, name: str, kind: str, message: str, *, remedy: str = "", log: tuple[str, ...] = ()) -> None:
        super().__init__(f"worker {name} did not start: {message}" + (f"\n{remedy}" if remedy else ""))
        self.name = name
        self.kind = kind
        self.message = message
        self.remedy = remedy
        self.log = log


class WorkerDied(Exception):
    """A worker that was serving has exited. `status` as in subprocess: an exit code, or minus a signal."""

    def __init__(self, name: str, status: int, *, log: tuple[str, ...]) -> None:
        self.remedy = _DEATHS.get(status, "its last lines say why")
        super().__init__(f"worker {name} died, {_describe(status)} ({self.remedy}){_quote(log)}")
        self.name = name
        self.status = status
        self.log = log


class WorkerProcess:
    """A worker that reported ready. `client` is closed when the launch scope is left."""

    def __init__(self, name: str, child: ChildProcess, client: RpcClient) -> None:
        self.name = name
        self.pid = child.pid
        self.client = client
        self._child = child

    @property
    def log(self) -> tuple[str, ...]:
        """The last lines it printed."""
        return self._child.tail

    def kill(self) -> None:
        """End it at once, with all that it started, whatever it is doing. It is gone when `wait` returns."""
        self._child.kill()

    async def wait(self) -> int:
        """Return the exit status (as in subprocess) once the process has exited."""
        return await self._child.wait()

    async def watch(self) -> NoReturn:
        """Raise `WorkerDied` when the process exits, whoever ended it."""
        status = await self._child.wait()
        raise WorkerDied(self.name, status, log=self.log)


@asynccontextmanager
async def launch(
    module: str,
    *,
    name: str,
    spec: Struct,
    start_timeout_s: float = 180.0,
    stop_timeout_s: float = 10.0,
    on_line: Callable[[str, str], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> AsyncGenerator[WorkerProcess]:
    """Start `python -m module`, wait until it is ready, and stop it on leaving.

    `spec` reaches it over stdin. `on_line(name, line)` gets each line it prints (default: the logger "worker.<name>");
    `env` is added to this process's environment. Raises `LaunchError` when it does not become ready within
    `start_timeout_s`. Leaving sends SIGTERM and, after `stop_timeout_s`, SIGKILL to its whole process group; this is
    shielded from cancellation, and no process of the group is left.
    """
    log = logging.getLogger(f"worker.{name}")
    with _pipe() as (report, child_end):
        async with (
            _socket_folder() as folder,
            child_process(
                [sys.executable, "-m", module],
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                pass_fds=[child_end.fileno()],
                on_line=log.info if on_line is None else partial(on_line, name),
                stop_timeout_s=stop_timeout_s,
            ) as child,
        ):
            assignment = Assignment(
                name=name,
                address=f"unix:{folder}/rpc",
                token=secrets.token_urlsafe(32),
                report_fd=child_end.fileno(),
                launcher_pid=os.getpid(),
                folder=folder,
                spec=msgspec.Raw(msgspec.json.encode(spec)),
            )
            child_end.close()  # so that the pipe ends with the child
            address = await _start(child, assignment, report, start_timeout_s)
            client = RpcClient(address, assignment.token, name=name)
            try:
                yield WorkerProcess(name, child, client)
            finally:
                with anyio.move_on_after(_CLOSE_S, shield=True):
                    await client.aclose()


async def _start(child: ChildProcess, assignment: Assignment, report: FileIO, timeout_s: float) -> str:
    """Give the child its assignment; return the address it then listens on."""
    name = assignment.name
    with anyio.move_on_after(timeout_s):
        await child.send(encode_line(assignment))
        line = await _read_line(report)
        if not line:
            status = await child.wait()
            raise LaunchError(name, "died", f"{_describe(status)}{_quote(child.tail)}", log=child.tail)
        try:
            message = msgspec.json.decode(line, type=Ready | StartFailed)
        except msgspec.MsgspecError as error:
            raise LaunchError(name, "bad_report", f"its report cannot be read: {error}", log=child.tail) from error
        if isinstance(message, StartFailed):
            raise LaunchError(name, message.kind, message.message, remedy=message.remedy, log=child.tail)
        return message.address
    await child.dump_stacks()
    raise LaunchError(
        name,
        "not_ready",
        f"not ready after {timeout_s:g} s{_quote(child.tail)}",
        remedy="raise workers.start_timeout_s if it is only slow; its stacks above say where it was",
        log=child.tail,
    )


async def _read_line(pipe: FileIO) -> bytes:
    """One line; empty when the pipe ended without any byte."""
    os.set_blocking(pipe.fileno(), False)
    line = b""
    while not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES:
        await anyio.wait_readable(pipe)
        part = os.read(pipe.fileno(), 65536)
        if not part:
            break
        line += part
    return line


@contextmanager
def _pipe() -> Generator[tuple[FileIO, FileIO]]:
    """Read end and write end."""
    read, write = os.pipe()
    with FileIO(read, "rb") as reader, FileIO(write, "wb") as writer:
        yield reader, writer


@asynccontextmanager
async def _socket_folder() -> AsyncGenerator[str]:
    path = await anyio.to_thread.run_sync(_make_socket_folder)
    try:
        yield path
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(partial(shutil.rmtree, path, ignore_errors=True))


def _make_socket_folder() -> str:
    """A folder of mode 0700 whose path is short enough for a unix socket's."""
    path = tempfile.mkdtemp(prefix=_folder_prefix())
    if len(os.fsencode(path)) <= _MAX_FOLDER_BYTES:
        return path
    os.rmdir(path)  # noqa: PTH106
    return tempfile.mkdtemp(prefix=_folder_prefix(), dir="/tmp")


def _folder_prefix() -> str:
    return f"monoloop-{os.getpid()}-"


def remove_socket_folders() -> None:
    """Remove what this process's launches made, for a process that ends without leaving their scopes."""
    for parent in {Path(tempfile.gettempdir()), Path("/tmp")}:  # noqa: S108
        for folder in parent.glob(f"{_folder_prefix()}*"):
            shutil.rmtree(folder, ignore_errors=True)


def _describe(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _quote(log: tuple[str, ...]) -> str:
    return "".join(f"\n  | {line}" for line in log)
