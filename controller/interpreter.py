"""Settings of the interpreter that keep the event loop free: fast thread switches, and a collector with little to do."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager

SWITCH_INTERVAL_S = 0.001
"""How soon a busy Python thread lets the loop run again; Python's own 5 ms add up to long stalls."""
COLLECT_EVERY = (100, 10, 10_000)
"""Thresholds of the collector's three generations. The first is small because it counts allocations less releases. Rollouts
in flight release about as much as they allocate: with thousands of them Python's own 700 is reached so seldom that the young
objects are hundreds of thousands then, and keep the loop for as many microseconds.

A full collection keeps it for as long as much is alive: 0.1 s with a few hundred rollouts in flight, 1 s with ten thousand.
They leave nothing that the young ones do not find, so that it is made a hundred times less often than by Python's own
settings: for what user code may leave."""


@contextmanager
def quiet_interpreter() -> Generator[None]:
    """Apply them while inside, and keep all objects that are there at the beginning out of the collector's way."""
    switch_interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        sys.setswitchinterval(switch_interval)
