"""Signals: the first asks for an orderly end, the second ends the process, whatever the event loop is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

HANG_GUARD_S = 60

PROGRAM = """
import sys, time
import anyio
from controller.interrupts import open_interrupts

async def main():
    async with open_interrupts() as interrupts:
        interrupts.on_first = lambda text: print(text, flush=True)
        interrupts.blocked_at = lambda: "at somewhere:1"
        with interrupts.scope():
            print("ready", flush=True)
            BODY
        print("ended by", interrupts.signal.name, flush=True)

anyio.run(main, backend_options={"use_uvloop": sys.argv[1] == "uvloop"})
"""


@contextmanager
def started(body: str, loop: str = "uvloop") -> Generator[subprocess.Popen[str]]:
    code = PROGRAM.replace("BODY", textwrap.indent(textwrap.dedent(body), " " * 12).strip())
    process = subprocess.Popen(
        [sys.executable, "-c", code, loop],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_one_cancels_what_stands_in_a_scope(loop: str, signum: signal.Signals) -> None:
    with started("await anyio.sleep(1000)", loop) as process:
        process.send_signal(signum)
        out, err = process.communicate(timeout=HANG_GUARD_S)
    assert out == f"{signum.name}: stopping in order; once more ends it at once\nended by {signum.name}\n"
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_second_one_ends_a_process_whose_loop_is_blocked(loop: str) -> None:
    with started("time.sleep(1000)", loop) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.readline() == "\n"
        said = process.stderr.readline()
        assert said == (
            "SIGINT: the event loop is blocked at somewhere:1 and cannot stop the run in order; once more ends it at once\n"
        )
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 130
    assert err == "\nsecond SIGINT: leaving at once\n"


def test_a_second_one_ends_a_process_that_does_not_come_to_its_end() -> None:
    body = """
        with anyio.CancelScope(shield=True):
            await anyio.sleep(1000)
    """
    with started(body) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert "stopping in order" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 143
