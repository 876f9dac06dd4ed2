"""CPU-heavy functions off the controller's loop: each runs in a worker process that is killed when its time is up.

A thread is not enough for scoring what a model wrote: an answer such as 9**9**9 can hold the interpreter for ever. Spawning,
pickling and waiting happen in threads, so the loop only ever awaits.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar, TypeVarTuple, cast

import anyio
from anyio import CapacityLimiter, to_process, to_thread
from anyio.lowlevel import RunVar

Args = TypeVarTuple("Args")
Result = TypeVar("Result")

_START_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 5.0
_ORPHAN_GRACE_S = 1.0


class WorkerDied(RuntimeError):
    """The worker process ended while it ran a call: killed from outside, or by what the function did."""


async def offload(fn: Callable[[*Args], Result], *args: *Args, timeout_s: float) -> Result:
    """Run `fn(*args)` in a worker process and return its result or raise its exception.

    `fn` is importable (not a lambda or a local function); arguments and result are picklable. At most one call per CPU runs
    at a time, the others wait for their turn. Workers are kept for later calls, with whatever `fn` has imported or cached.

    `timeout_s` counts from the moment a ready worker is given the call; it includes importing `fn`. Raises TimeoutError
    when it has passed, WorkerDied when the process ended by itself, RuntimeError when none can be started. After all of
    these and after a cancellation the process is gone; a cancellation first waits for a worker that is still starting.
    """
    async with to_process.current_default_process_limiter():
        idle = _idle_workers()
        worker = idle.pop() if idle else await to_thread.run_sync(_Worker, limiter=CapacityLimiter(1))
        try:
            with anyio.fail_after(timeout_s):
                succeeded, value = await to_thread.run_sync(
                    worker.call, fn, args, timeout_s, abandon_on_cancel=True, limiter=CapacityLimiter(1)
                )
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(worker.kill, limiter=CapacityLimiter(1))
            if isinstance(error, TimeoutError):
                took = f"{_name(fn)} ran longer than {timeout_s:g} s in a worker process and was killed"
                raise TimeoutError(took) from None
            raise
        idle.append(worker)
    if succeeded:
        return cast(Result, value)
    raise value


async def stop_idle_workers() -> None:
    """End the processes that this loop keeps for later calls. They also end with the loop or the process."""
    idle = _idle_workers()
    with anyio.CancelScope(shield=True):
        while idle:
            await to_thread.run_sync(idle.pop().kill, limiter=CapacityLimiter(1))


class _Worker:
    """One process that runs one call at a time. Its methods block, bounded by the process's life; call them in threads."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # A daemon process ends with its parent; when the parent was killed, the end of the pipe tells it.
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True, name="offload")
        self._process.start()
        theirs.close()
        ready = False
        with contextlib.suppress(EOFError):
            ready = self._pipe.poll(_START_TIMEOUT_S) and self._pipe.recv_bytes() == b"ready"
        if not ready:
            self.kill()
            raise RuntimeError(
                f"a worker process did not start within {_START_TIMEOUT_S:g} s, or ended; its own error is on stderr "
                '(a script that uses offload starts its work under `if __name__ == "__main__":`)'
            )

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> tuple[bool, Any]:
        """(True, result) or (False, the exception that `fn` raised)."""
        request = pickle.dumps((fn, args, timeout_s))
        try:
            self._pipe.send_bytes(request)
            reply = self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise WorkerDied(f"the worker process running {_name(fn)} ended by itself") from error
        return pickle.loads(reply)  # noqa: S301 - written by our own child process

    def kill(self) -> None:
        # The pipe is left to its last reference: an abandoned `call` may be reading from it, and a closed file
        # descriptor's number can be given to another file.
        self._process.kill()
        self._process.join(_JOIN_TIMEOUT_S)


def _serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    pipe.send_bytes(b"ready")
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_run(request))


def _run(request: bytes) -> bytes:
    try:
        fn, args, timeout_s = pickle.loads(request)  # noqa: S301 - written by the parent process
        # When the parent was killed and nobody is left to end an endless `fn`, the alarm's default action does.
        signal.setitimer(signal.ITIMER_REAL, timeout_s + _ORPHAN_GRACE_S)
        try:
            return pickle.dumps((True, fn(*args)))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Exception as error:
        error.add_note("in a worker process:\n" + traceback.format_exc())
        return _pickled_error(error)


def _pickled_error(error: Exception) -> bytes:
    try:
        pickled = pickle.dumps((False, error))
        pickle.loads(pickled)  # noqa: S301 - an exception with its own __init__ may pickle and then not load
    except Exception:
        return pickle.dumps((False, RuntimeError("".join(traceback.format_exception(error)))))
    return pickled


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


_IDLE: RunVar[list[_Worker]] = RunVar("offload_idle_workers")


def _idle_workers() -> list[_Worker]:
    try:
        return _IDLE.get()
    except LookupError:
        workers: list[_Worker] = []
        _IDLE.set(workers)
        return workers
