"""How weights pass from the trainer to the engines: what both sides are told at start."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

UpdateMode = Literal["keep", "drain", "abort"]
"""What happens to the calls that run in an engine when its weights change; see `workers.generation.updates`."""

NATIVE = ("nccl", "ipc")
"""Transports from GPU to GPU, by vLLM's own weight transfer."""
BUILT_IN = ("file", "gloo", *NATIVE)


class WeightSyncSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    transport: str = "file"
    """One of `BUILT_IN`, or `module:Class` of one's own."""
    mode: UpdateMode = "keep"
    drain_timeout_s: float = 60.0
    """How long `drain` waits for calls to end."""
    host: str = "127.0.0.1"
    """Address of the trainer's machine, at which engines reach it."""
    engines: int = 1
    """Generation workers there are."""
    timeout_s: float = 120.0
    """Deadline of receiving a version."""
    folder: str = ""
    """Where the trainer writes files, e.g. in /dev/shm. Of the trainer only."""
    args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the transport of one's own."""
