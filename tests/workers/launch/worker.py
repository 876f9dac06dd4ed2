"""A worker for the launch tests: run as `python -m tests.workers.launch.worker`; its spec says how it misbehaves."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.to_thread
from msgspec import Struct

from workers.host import StartupError, run_worker
from workers.rpc.method import Empty, Method
from workers.rpc.server import RpcServer


class Spec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    fault: str = ""
    pid_file: str = ""
    """Where the pid of a grandchild is written."""
    padding: str = ""


class Number(Struct, frozen=True, forbid_unknown_fields=True):
    value: int


DOUBLE = Method("double", Number, Number, timeout_s=30.0)
SLEEP = Method("sleep", Empty, Empty, timeout_s=30.0)
EXIT = Method("exit", Number, Empty, timeout_s=30.0)
WEDGE = Method("wedge", Empty, Empty, timeout_s=30.0)
BREAK = Method("break", Empty, Empty, timeout_s=30.0)
IGNORES_SIGTERM = Method("ignores_sigterm", Empty, Empty, timeout_s=30.0)


async def double(request: Number) -> Number:
    return Number(2 * request.value)


async def sleep(request: Empty) -> Empty:
    await anyio.sleep_forever()
    return request


async def exit_with(request: Number) -> Empty:
    print(f"leaving with {request.value}")
    os._exit(request.value)


async def wedge(request: Empty) -> Empty:
    """Block the event loop for good."""
    print("wedged")
    time.sleep(10_000)  # noqa: ASYNC251
    return request


async def ignores_sigterm(request: Empty) -> Empty:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return request


def garble_report() -> None:
    """Write to every open pipe above stderr, which the report pipe is one of."""
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir() if int(path.name) > 2]:
        with suppress(OSError):
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.write(fd, b"Loading weights: 100%\n")


def spawn_grandchild(pid_file: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"])
    Path(pid_file).write_text(str(child.pid))


@asynccontextmanager
async def serve(spec: Spec, server: RpcServer) -> AsyncGenerator[None]:
    server.register(DOUBLE, double)
    server.register(SLEEP, sleep)
    server.register(EXIT, exit_with)
    server.register(WEDGE, wedge)
    server.register(IGNORES_SIGTERM, ignores_sigterm)
    print(f"greeting: {os.environ.get('GREETING', '')}")
    match spec.fault:
        case "raises":
            raise RuntimeError("the model is not there")
        case "startup_error":
            raise StartupError("no_model", "there is no model in /nowhere", remedy="set model.path")
        case "exits":
            print("last words")
            os._exit(3)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "garbles_report":
            garble_report()
        case "never_ready":
            await anyio.sleep_forever()
        case "blocks_at_start":
            time.sleep(10_000)  # noqa: ASYNC251
        case "grandchild":
            await anyio.to_thread.run_sync(spawn_grandchild, spec.pid_file)
        case "hung_thread":
            threading.Thread(target=time.sleep, args=(10_000,)).start()
        case _:
            pass
    broken = anyio.Event()

    async def break_(request: Empty) -> Empty:
        broken.set()
        return request

    async def fail_when_broken() -> None:
        await broken.wait()
        raise ValueError("the engine broke")

    server.register(BREAK, break_)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail_when_broken)
            yield
            tasks.cancel_scope.cancel()
    finally:
        print("closed")


if __name__ == "__main__":
    run_worker(Spec, serve)
