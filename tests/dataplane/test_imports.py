"""Importing the package, and all that the controller needs before it connects, loads no heavy library."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_contract_loads_no_heavy_library() -> None:
    light = (
        "address, doctor, errors, memory, operation, plane, private_loop, ray_settings, rows, scheduler, schema, "
        "server_process, servers, sink, software, spec, topology"
    )
    script = f"""
import sys, dataplane
from dataplane import {light}
heavy = {{"torch", "ray", "transfer_queue", "tensordict", "zmq", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True)
