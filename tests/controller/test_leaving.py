"""A process that has something to leave behind ends all the same, with the code that it was to end with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


@pytest.mark.parametrize("how", ["leave_within(0.2, 7)", "leave(7, 'last words')"])
def test_a_thread_that_never_ends_does_not_hold_the_process(how: str) -> None:
    ended = run(
        "import threading, time\n"
        "from controller.leaving import leave, leave_within\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        f"{how}\n"
    )
    assert ended.returncode == 7
    assert ended.stderr == ("" if "within" in how else "\nlast words\n")


def test_a_process_that_ends_by_itself_is_not_waited_for() -> None:
    assert run("from controller.leaving import leave_within; leave_within(1000, 7)").returncode == 0


def test_what_is_alive_at_the_end_of_a_run_is_left_as_it_is_and_exit_functions_are_called() -> None:
    ended = run(
        "import atexit\n"
        "import controller.cli as cli\n"
        "class Native:\n"
        "    def __del__(self): print('collected')\n"
        "alive = Native()\n"
        "def main(**_):\n"
        "    atexit.register(print, 'the user\\'s own')\n"
        "    print('the result')\n"
        "    return 3\n"
        "cli.main = main\n"
        "cli.program()\n"
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "the result\nthe user's own\n", "")
