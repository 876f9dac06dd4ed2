"""What launcher and worker process tell each other while the worker starts.

The launcher writes one line, an `Assignment`, to the worker's stdin and then keeps stdin open: its end means that the
launcher is gone. The worker writes one line, a `Ready` or a `StartFailed`, to the file descriptor it was given.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

MAX_LINE_BYTES = 1024 * 1024


class Assignment(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Travels over stdin and never in argv or the environment, which other users can read: it holds the token."""

    name: str
    address: str
    token: str
    report_fd: int
    launcher_pid: int
    folder: str
    """Holds the socket. The launcher removes it; when the launcher is gone, the worker does."""
    spec: msgspec.Raw
    """The worker's own spec, in JSON."""


class Ready(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="ready"):
    address: str
    """Where it listens."""


class StartFailed(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="failed"):
    kind: str
    message: str
    remedy: str = ""


def encode_line(message: Struct) -> bytes:
    """JSON, which never holds a raw newline, and a newline."""
    return msgspec.json.encode(message) + b"\n"
