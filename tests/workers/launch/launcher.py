"""Launches one worker, prints its pid and waits to be killed: `python -m tests.workers.launch.launcher FAULT PID_FILE`."""

from __future__ import annotations

import os
import sys
import time

import anyio

from tests.workers.launch.worker import WEDGE, Spec
from workers.launch import launch
from workers.rpc.method import Empty


async def main(fault: str, pid_file: str) -> None:
    wedged = anyio.Event()

    def on_line(_: str, line: str) -> None:
        if line == "wedged":
            wedged.set()

    spec = Spec(fault=fault, pid_file=pid_file)
    async with launch("tests.workers.launch.worker", name="w0", spec=spec, on_line=on_line) as worker:
        fork = hold_everything_open() if fault == "fork_holds_lifeline" else 0
        async with anyio.create_task_group() as tasks:
            if fault == "wedges":
                tasks.start_soon(worker.client.call, WEDGE, Empty())
                await wedged.wait()
            print(worker.pid, fork, flush=True)
            await anyio.sleep_forever()


def hold_everything_open() -> int:
    """As a multiprocessing pool does: a fork keeps the write end of the worker's stdin open. Its pid."""
    fork = os.fork()
    if fork == 0:
        time.sleep(10_000)
        os._exit(0)
    return fork


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:3])
