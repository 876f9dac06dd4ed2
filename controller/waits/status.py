"""`python -m controller status URL|RUN_DIR`: why a run is, or is not, moving, in plain words."""

from __future__ import annotations

import argparse
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from controller.exits import Exit
from controller.reporting.summary import SUMMARY_FILE
from controller.waits.graph import WaitGraph
from controller.waits.server import STACKS, STATUS_FILE, WAITS, StatusAddress
from controller.waits.text import describe

_ANSWER_S = 10.0
_MAX_BYTES = 16 * 2**20
_STOPPED_STATES = "Tt"
_STOPPED = "is stopped (by SIGSTOP or a debugger); `kill -CONT {pid}` lets it go on"


class NoStatus(Exception):
    """The run cannot be asked. The message says what is known."""


def main(argv: Sequence[str]) -> int:
    """Print the status and return 0; 1 when the run cannot be asked."""
    parser = argparse.ArgumentParser(
        prog="python -m controller status",
        description="Say what a run is waiting for: who, for what, and since when.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="URL|RUN_DIR", help="the run's folder, or the address that the run printed")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print what GET /debug/waits answers")
    form.add_argument(
        "--stacks", action="store_true", help="print the stacks of all tasks and threads of the controller"
    )
    arguments = parser.parse_args(argv)
    try:
        address = _address(arguments.run)
        if arguments.stacks:
            text = _get(address, STACKS).decode(errors="replace")
        else:
            body = _get(address, WAITS)
            text = body.decode() if arguments.json else describe(_with_stopped(_decode(address, body)))
    except NoStatus as error:
        print(error, file=sys.stderr)  # noqa: T201
        return Exit.FAILED
    print(text)  # noqa: T201
    return Exit.FINISHED


def _decode(address: StatusAddress, body: bytes) -> WaitGraph:
    try:
        return msgspec.json.decode(body, type=WaitGraph)
    except msgspec.MsgspecError as error:
        raise NoStatus(f"what answers at {address.url} is no run of this version: {error}") from error


def _with_stopped(graph: WaitGraph) -> WaitGraph:
    """With the run's processes that the kernel says are stopped: they cannot say so themselves."""
    stopped = {
        name: f"process {pid} {_STOPPED.format(pid=pid)}"
        for name, pid in graph.processes.items()
        if _stat(pid)[:2] in ([state, str(graph.pid)] for state in _STOPPED_STATES)
    }
    return replace(graph, unhealthy=graph.unhealthy | stopped)


def _address(run: str) -> StatusAddress:
    if run.startswith(("http://", "https://")):
        return StatusAddress(url=run.rstrip("/"), pid=0)
    folder = Path(run)
    try:
        return msgspec.json.decode((folder / STATUS_FILE).read_bytes(), type=StatusAddress)
    except FileNotFoundError:
        raise NoStatus(_ended(folder)) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise NoStatus(f"{folder / STATUS_FILE} cannot be read: {error}") from error


def _ended(folder: Path) -> str:
    if (folder / SUMMARY_FILE).exists():
        return f"no run is active in {folder}; {folder / SUMMARY_FILE} says how the last one ended"
    return f"no run is active in {folder}: there is no {STATUS_FILE}"


def _get(address: StatusAddress, path: str) -> bytes:
    try:
        with urllib.request.urlopen(address.url + path, timeout=_ANSWER_S) as answer:  # noqa: S310  # the user's own URL
            return answer.read(_MAX_BYTES)
    except TimeoutError as error:
        raise NoStatus(f"{address.url} does not answer within {_ANSWER_S:g} s: {_state(address.pid)}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise NoStatus(f"{address.url} does not answer ({reason}): {_state(address.pid)}") from error


def _state(pid: int) -> str:
    """What the kernel says of the controller's process."""
    if not pid:
        return "is the run still active?"
    stat = _stat(pid)
    if not stat:
        return f"its process {pid} is gone; it was killed, or its machine is another one"
    if stat[0] in _STOPPED_STATES:
        return f"its process {pid} {_STOPPED.format(pid=pid)}"
    return f"its process {pid} is in state {stat[0]}; native code may keep its interpreter: SIGINT twice ends it"


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process: its state, its parent, and more; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
