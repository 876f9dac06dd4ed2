"""A child process in a session of its own that ends with its `async with`: no zombie, and nothing of its group, is left.

Linux only: the exit is awaited on a pidfd, which leaves the child unreaped (its group id cannot be reused) until the rest
of its group is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

logger = logging.getLogger(__name__)

_TAIL_LINES = 40
_MAX_LINE_BYTES = 16 * 1024
_READ_BYTES = 8 * 1024
_DUMP_S = 0.5
"""For the stacks that SIGUSR1 asks for, before SIGKILL."""
_KILL_S = 5.0
"""A killed process that has not ended by then hangs in the kernel."""
_DRAIN_S = 1.0
"""For output that is still in the pipe after the exit."""


class ChildProcess:
    """A running child. Its stdout and stderr come line by line to `on_line`; the last lines are kept."""

    def __init__(self, popen: subprocess.Popen[bytes], pidfd: int, on_line: Callable[[str], None]) -> None:
        assert popen.stdin is not None
        assert popen.stdout is not None
        self._popen = popen
        self._pidfd = pidfd
        self._on_line = on_line
        self._stdin = popen.stdin
        self._stdout = popen.stdout
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._exited = anyio.Event()
        self._drained = anyio.Event()
        self._status = 0
        self._reaping = anyio.CancelScope(shield=True)
        self._forwarding = anyio.CancelScope(shield=True)
        self.pid = popen.pid

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines it printed."""
        return tuple(self._tail)

    async def wait(self) -> int:
        """The exit status, or minus the signal that ended it, once it has exited and its output has been read."""
        await self._exited.wait()
        with anyio.move_on_after(_DRAIN_S):
            await self._drained.wait()
        return self._status

    async def send(self, data: bytes) -> None:
        """Write to its stdin, which stays open. Returns early when the child has closed it or exited."""
        os.set_blocking(self._stdin.fileno(), False)
        with contextlib.suppress(BrokenPipeError):
            while data:
                await anyio.wait_writable(self._stdin)
                data = data[os.write(self._stdin.fileno(), data) :]

    async def dump_stacks(self) -> None:
        """Ask for its threads' stacks (SIGUSR1), which appear among its lines. A child that is no worker yet dies of it."""
        self._signal(signal.SIGUSR1)
        with anyio.move_on_after(_DUMP_S):
            await self._exited.wait()

    def kill(self) -> None:
        """SIGKILL to the whole group, which ends a stopped process too."""
        self._kill_group()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then after `grace_s` SIGKILL to the whole group."""
        self._signal(signal.SIGTERM)
        with anyio.move_on_after(grace_s):
            await self.wait()
            return
        logger.warning("process %d did not stop within %g s; killing it", self.pid, grace_s)
        await self.dump_stacks()
        self._kill_group()
        with anyio.move_on_after(_KILL_S):
            await self.wait()
            return
        logger.error("process %d hangs in the kernel after SIGKILL; left behind", self.pid)

    async def reap(self) -> None:
        """Wait for the exit, kill the rest of the group, and free the process. Deaf to cancellation, as `stop` needs it."""
        with self._reaping:
            await anyio.wait_readable(self._pidfd)
            self._kill_group()
            self._status = self._popen.wait()
            self._exited.set()

    async def forward_output(self) -> None:
        """Hand out the lines until the pipe ends. Deaf to cancellation, so that the last ones are not lost."""
        with self._forwarding:
            await self._forward_output()

    async def _forward_output(self) -> None:
        os.set_blocking(self._stdout.fileno(), False)
        rest = b""
        while not self._drained.is_set():
            await anyio.wait_readable(self._stdout)
            part = os.read(self._stdout.fileno(), _READ_BYTES)
            *lines, rest = (rest + part).split(b"\n")
            if rest and (not part or len(rest) > _MAX_LINE_BYTES):
                lines.append(rest)
                rest = b""
            for line in lines:
                text = line.decode(errors="replace").rstrip("\r")
                self._tail.append(text)
                self._on_line(text)
            if not part:
                self._drained.set()

    def abandon(self) -> None:
        """End `reap` and `forward_output` if they still wait: for a process that hangs, or a pipe that another holds."""
        self._reaping.cancel()
        self._forwarding.cancel()

    def close(self) -> None:
        self._stdin.close()
        self._stdout.close()
        os.close(self._pidfd)

    def _signal(self, number: signal.Signals) -> None:
        if not self._exited.is_set():
            os.kill(self.pid, number)

    def _kill_group(self) -> None:
        if not self._exited.is_set():
            os.killpg(self.pid, signal.SIGKILL)


@asynccontextmanager
async def child_process(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    pass_fds: Sequence[int],
    on_line: Callable[[str], None],
    stop_timeout_s: float,
) -> AsyncGenerator[ChildProcess]:
    """Run `command` until the scope is left; leaving it stops the child, shielded from cancellation.

    The child leads a session of its own, so that a terminal's Ctrl-C does not reach it. Raises OSError when it cannot be
    started.
    """
    # In a thread: fork and exec take milliseconds. It is not abandoned on cancellation, so no child is lost.
    child = ChildProcess(*await anyio.to_thread.run_sync(_spawn, command, env, pass_fds), on_line)
    failure: Exception | None = None
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child.reap)
            tasks.start_soon(child.forward_output)
            try:
                yield child
            except Exception as error:
                failure = error  # raised outside of the task group, which would wrap it
            finally:
                with anyio.CancelScope(shield=True):
                    await child.stop(stop_timeout_s)
                child.abandon()
    finally:
        child.close()
    if failure is not None:
        raise failure


def _spawn(
    command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int]
) -> tuple[subprocess.Popen[bytes], int]:
    popen = subprocess.Popen(
        command,
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        pass_fds=pass_fds,
        start_new_session=True,
    )
    try:
        return popen, os.pidfd_open(popen.pid)
    except OSError:
        popen.kill()
        popen.wait()
        raise
