"""Runs a program to its end: bytes in, bounded output out. Nothing that it started outlives the call, daemons included,
unless it has left both its process group and its environment.

Linux only: a pidfd tells of its exit without reaping it, so that its group's id stays its own until the group is killed; a
memfd is its input, so that nobody has to write it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

_READ_BYTES = 64 * 1024
_DRAIN_S = 1.0
"""For output that is still in the pipes after the exit; a grandchild may hold them open."""
_REAP_S = 5.0
"""A killed process that has not ended by then hangs in the kernel."""
_HUNTS = 20


@dataclass(frozen=True)
class Finished:
    """`status` is the exit status, or minus the signal that ended it."""

    status: int
    output: bytes
    """Its stdout."""
    errors: bytes
    """The end of its stderr."""


class OutputTooLarge(Exception):
    """It printed more than it may; it was killed."""


async def run_program(
    command: Sequence[str],
    *,
    stdin: bytes,
    env: Mapping[str, str],
    mark: tuple[str, str],
    max_output_bytes: int,
    max_error_bytes: int = 4096,
    grace_s: float = 2.0,
) -> Finished:
    """Run `command` in a session of its own. Raises OSError when it cannot be started, and OutputTooLarge.

    A cancellation sends its group SIGTERM and, `grace_s` later at the latest, SIGKILL. What left the group is found by
    `mark`, a variable of `env` that no other program has.
    """
    output, errors = bytearray(), bytearray()

    def keep_output(data: bytes) -> None:
        output.extend(data)
        if len(output) > max_output_bytes:
            raise OutputTooLarge(f"it printed more than {max_output_bytes} bytes")

    def keep_errors(data: bytes) -> None:
        errors.extend(data)
        del errors[:-max_error_bytes]

    try:
        async with _started(command, stdin, env, mark, grace_s) as (popen, pidfd), anyio.create_task_group() as readers:
            assert popen.stdout is not None
            assert popen.stderr is not None
            readers.start_soon(_read, popen.stdout.fileno(), keep_output)
            readers.start_soon(_read, popen.stderr.fileno(), keep_errors)
            await anyio.wait_readable(pidfd)
            readers.cancel_scope.deadline = anyio.current_time() + _DRAIN_S
    except BaseExceptionGroup as group:
        too_large = group.subgroup(OutputTooLarge)
        if too_large is None:
            raise
        raise OutputTooLarge(f"it printed more than {max_output_bytes} bytes") from None
    return Finished(popen.returncode, bytes(output), bytes(errors))


@asynccontextmanager
async def _started(
    command: Sequence[str], stdin: bytes, env: Mapping[str, str], mark: tuple[str, str], grace_s: float
) -> AsyncGenerator[tuple[subprocess.Popen[bytes], int]]:
    # In a thread, as fork and exec take milliseconds; not abandoned on cancellation, so that no process is lost.
    popen, pidfd = await anyio.to_thread.run_sync(_spawn, command, stdin, env)
    try:
        yield popen, pidfd
    finally:
        with anyio.CancelScope(shield=True):
            await _end(popen, pidfd, grace_s)
            await anyio.to_thread.run_sync(_kill_marked, f"{mark[0]}={mark[1]}".encode())


async def _end(popen: subprocess.Popen[bytes], pidfd: int, grace_s: float) -> None:
    """Not reaped yet, the process keeps its group's id from being used again."""
    assert popen.stdout is not None
    assert popen.stderr is not None
    os.killpg(popen.pid, signal.SIGTERM)
    with anyio.move_on_after(grace_s):
        await anyio.wait_readable(pidfd)
    os.killpg(popen.pid, signal.SIGKILL)
    with anyio.move_on_after(_REAP_S):
        await anyio.wait_readable(pidfd)
        popen.wait()
    popen.stdout.close()
    popen.stderr.close()
    os.close(pidfd)


async def _read(fd: int, keep: Callable[[bytes], None]) -> None:
    os.set_blocking(fd, False)
    while True:
        await anyio.wait_readable(fd)
        data = os.read(fd, _READ_BYTES)
        if not data:
            return
        keep(data)


def _kill_marked(entry: bytes) -> None:
    """Kill every process that has `entry` in its environment, as long as there are some; a bounded number of times, as
    a killed one may have started another."""
    for _ in range(_HUNTS):
        if not sum(_kill_if_marked(int(pid.name), entry) for pid in Path("/proc").iterdir() if pid.name.isdecimal()):
            return


def _kill_if_marked(pid: int, entry: bytes) -> bool:
    with suppress(OSError):  # It is gone, or somebody else's.
        pidfd = os.pidfd_open(pid)
        try:
            if entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return True
        finally:
            os.close(pidfd)
    return False


def _spawn(command: Sequence[str], stdin: bytes, env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    with os.fdopen(os.memfd_create("stdin"), "r+b") as given:
        given.write(stdin)
        given.seek(0)
        popen = subprocess.Popen(
            command,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=env,
            start_new_session=True,
        )
    try:
        return popen, os.pidfd_open(popen.pid)
    except OSError:
        popen.kill()
        popen.wait()
        raise
