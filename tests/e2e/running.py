"""Starts `python -m controller` as a user does, and finds every process that it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

HANG_GUARD_S = 150.0
MARK = "MONOLOOP_TEST_RUN"


class StartedRun:
    """A running controller. `output` is what it printed so far, stdout and stderr together."""

    def __init__(self, process: Process, mark: str, run_dir: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.output = ""
        self._mark = mark
        self._grown = anyio.Event()
        self._all_read = anyio.Event()

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for text in TextReceiveStream(self.process.stdout, errors="replace"):
            self.output += text
            self._grown.set()
            self._grown = anyio.Event()
        self._all_read.set()

    async def until(self, pattern: str) -> re.Match[str]:
        """Wait for a line that matches."""
        with anyio.fail_after(HANG_GUARD_S):
            while not (match := re.search(pattern, self.output, re.MULTILINE)):
                assert self.process.returncode is None, f"ended before {pattern!r} was printed:\n{self.output}"
                await self._grown.wait()
            return match

    async def exit_code(self) -> int:
        """All that it printed is in `output` then, unless a process that it left holds its pipe."""
        with anyio.fail_after(HANG_GUARD_S):
            code = await self.process.wait()
        with anyio.move_on_after(5):
            await self._all_read.wait()
        return code

    def interrupt(self, signum: signal.Signals = signal.SIGINT) -> None:
        """As a terminal does it for the foreground process, or a job manager."""
        os.kill(self.process.pid, signum)

    def processes(self) -> list[int]:
        """Every live process of this run, grandchildren and daemons too: they inherit the mark in their environment."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if self._mark.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    async def gone(self, within_s: float = 10.0) -> None:
        """Wait until no process of the run is left; fail when one outlives the bound."""
        with anyio.move_on_after(within_s):
            while self.processes():
                await anyio.sleep(0.05)
        names = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in self.processes()}
        assert not names, f"processes left behind: {names}"

    def summary(self) -> Any:
        return msgspec.json.decode((self.run_dir / "summary.json").read_bytes())

    def metrics(self) -> list[Any]:
        return [msgspec.json.decode(line) for line in (self.run_dir / "metrics.jsonl").read_bytes().splitlines()]


@asynccontextmanager
async def started(config: dict[str, Any], folder: Path, *arguments: str) -> AsyncIterator[StartedRun]:
    """`python -m controller --config <config> <arguments>` in `folder`; killed, with all that it started, on leaving."""
    file = folder / "config.yaml"
    file.write_bytes(msgspec.yaml.encode(config))
    mark = uuid.uuid4().hex
    root = Path(__file__).parents[2]
    process = await anyio.open_process(
        [sys.executable, "-m", "controller", "--config", str(file), *arguments],
        stderr=-2,
        cwd=folder,
        env={**os.environ, MARK: mark, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
    )
    run = StartedRun(process, mark, folder / config["run"]["dir"])
    async with anyio.create_task_group() as tg:
        tg.start_soon(run.read)
        try:
            yield run
        finally:
            for pid in run.processes():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            with anyio.CancelScope(shield=True):
                await process.wait()


async def finished(config: dict[str, Any], folder: Path, *arguments: str, code: int = 0) -> StartedRun:
    """Run to the end; the exit code must be `code`, and no process may be left."""
    async with started(config, folder, *arguments) as run:
        assert await run.exit_code() == code, run.output
        await run.gone()
    return run


def conserved(summary: Any) -> bool:
    """Every dispatched rollout has exactly one end, and no row is left."""
    ends = sum(summary[end] for end in ("trained", "evicted", "dropped", "aborted"))
    return (
        summary["dispatched"] == ends
        and summary["lost"] == summary["duplicated"] == 0
        and summary["rows_left"] == {"staging": 0, "train": 0}
    )
