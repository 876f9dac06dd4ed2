"""Whether a server lives, told by the kernel: a connection to it is held open, and ends when its process does.

A server that was killed is known at once. One that stands still keeps its connection and is not called dead: what it was
asked is bounded by the deadlines, and goes on when it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
from anyio.abc import SocketStream

from dataplane.errors import DataPlaneDown

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
PAUSE_S = 0.2
UNREACHABLE_S = 30.0
"""A machine that takes no connection for so long is called dead: of a process that stands still, the kernel takes them."""


async def require(server: str, host: str, port: int) -> None:
    """Raise DataPlaneDown unless something listens there."""
    try:
        with anyio.fail_after(CONNECT_TIMEOUT_S):
            await (await anyio.connect_tcp(host, port)).aclose()
    except (OSError, TimeoutError) as error:
        raise DataPlaneDown(f"{server} cannot be reached: {_reason(error)}") from error


async def watch(server: str, host: str, port: int, on_death: Callable[[DataPlaneDown], None]) -> None:
    """Return when `server` is dead, after telling `on_death` which one it was and why."""
    reached = anyio.current_time()
    while True:
        try:
            with anyio.fail_after(CONNECT_TIMEOUT_S):
                connection = await anyio.connect_tcp(host, port)
        except (OSError, TimeoutError) as error:
            refused = isinstance(error.__cause__, ConnectionRefusedError)
            if refused or anyio.current_time() - reached > UNREACHABLE_S:
                on_death(DataPlaneDown(f"{server} is gone: {_reason(error)}"))
                return
            _log.warning("%s cannot be reached: %s", server, _reason(error))
        else:
            await _until_it_ends(connection)
            reached = anyio.current_time()
        await anyio.sleep(PAUSE_S)


async def _until_it_ends(connection: SocketStream) -> None:
    """TransferQueue's servers end it too, every 30 s: nothing is said on it."""
    async with connection:
        try:
            while True:
                await connection.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return


def _reason(error: OSError | TimeoutError) -> str:
    if isinstance(error.__cause__, OSError):
        return str(error.__cause__)
    return f"no connection within {CONNECT_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else str(error)
