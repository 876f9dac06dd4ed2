"""Where the gate listens, and the file that tells the run's owner how to reach its control plane."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
import msgspec

from controller.config.schema import GateConfig
from ledger.http.server import listen

CONTROL_FILE = "control.json"


class GateAddressError(Exception):
    """The gate cannot listen where the configuration says."""


@dataclass(frozen=True)
class Listener:
    socket: socket.socket
    url: str
    """What agents are told, without a path."""


@asynccontextmanager
async def open_listener(config: GateConfig) -> AsyncGenerator[Listener]:
    """The gate's address, taken before anything slow is started; nothing is answered yet. Raises GateAddressError."""
    try:
        # In a thread, as a host name may have to be looked up.
        bound = await anyio.to_thread.run_sync(listen, config.host, config.port)
    except (OSError, UnicodeError) as e:
        raise GateAddressError(
            f"gate: cannot listen on {config.host} port {config.port}: {e}. Set gate.host to an address of this machine, "
            "and gate.port to a free port (0 takes one)"
        ) from e
    with bound:
        host, port = bound.getsockname()[:2]
        own = f"http://[{host}]:{port}" if bound.family == socket.AF_INET6 else f"http://{host}:{port}"
        yield Listener(bound, (config.public_url or own).rstrip("/"))


@contextmanager
def control_file(run_dir: Path, url: str, token: str) -> Generator[None]:
    """Keep `control.json`, readable by the run's owner only, while inside. Blocking."""
    path = run_dir / CONTROL_FILE
    unfinished = path.with_name(f"{CONTROL_FILE}.{os.getpid()}")
    unfinished.unlink(missing_ok=True)
    file = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(file, "wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode({"address": url, "token": token})) + b"\n")
    unfinished.rename(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
