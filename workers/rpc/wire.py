"""The RPC wire format: message size limit and health record."""

from __future__ import annotations

from msgspec import Struct

MAX_BYTES = 4 * 1024 * 1024


class Health(Struct, frozen=True, kw_only=True):
    """What a worker process says of itself."""

    name: str
    pid: int
    uptime_s: float
    in_flight: int
    """Handlers running now."""
