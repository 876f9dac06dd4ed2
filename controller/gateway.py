"""Where the gate listens, and the file that tells the run's owner how to reach its control plane."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from controller.config.schema import GateConfig
from controller.private_file import private_file
from ledger.http.connections import listen

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
    with private_file(run_dir / CONTROL_FILE, {"address": url, "token": token}):
        yield
