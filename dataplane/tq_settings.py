"""TransferQueue's settings. It reads them from the environment when it is imported, so they are set before that."""

from __future__ import annotations

import os

DEFAULTS = {
    "TQ_LOGGING_LEVEL": "ERROR",
    # TransferQueue sets torch's process-wide thread count around its work; 1 keeps its own work off the other cores.
    "TQ_NUM_THREADS": "1",
    # A lost request to a storage unit is sent again after this many seconds, up to so many times.
    "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "10",
    "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "3",
    "TQ_SIMPLE_STORAGE_PROBE_TIMEOUT": "5",
    # A put's notice to the controller is not sent again, and one that arrives after the put was taken back would mark
    # rows that are gone as readable: wait for it as long as for any other answer of the controller.
    "TQ_DATA_UPDATE_RESPONSE_TIMEOUT": "300",
    # Mooncake's client: what went wrong comes back as a code, and is reported as an error that names the call.
    "MC_LOG_LEVEL": "ERROR",
}


def apply() -> None:
    """Set what the environment leaves open. Without effect in a process that has imported TransferQueue already."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
