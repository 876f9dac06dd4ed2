"""What custody over HTTP costs: calls per CPU second of the gate's process, and the latency that it adds.

    python -m benchmarks.gate [--seconds 8] [--connections 64]

The gate runs as in a run: its HTTP server, ledger, journal on disk (group-commit fsync) and the RPC client to an engine in a
process of its own. That engine answers at once with coordinates as a real one proves them. Half of the calls begin a
conversation, half continue one. The baseline is the least that FastAPI on uvicorn (uvloop, httptools) can do: read the JSON
body and answer with a constant, without engine and custody. Everything stays on 127.0.0.1.

The last line is JSON. `calls_per_cpu_s` and `fastapi_calls_per_cpu_s`: calls by user and system time of all threads of the
serving process, with every connection busy. `added_ms_*`: latency at 500 calls/s, arrivals on a fixed clock (open loop),
from when a call was due to the last byte of its answer, the engine's and the load generator's own time included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RATE = 500
HANG_GUARD_S = 120


class Child:
    """A role of `benchmarks.gate_roles` in a process of its own; it speaks in lines of JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait(HANG_GUARD_S)}")
        return json.loads(line)

    def tell(self, what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def ask(self) -> Any:
        self.tell(None)
        return self.read()


@contextmanager
def child(role: str, *arguments: object) -> Generator[Child]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gate_roles", role, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Child(process)
    finally:
        process.kill()
        process.wait(HANG_GUARD_S)


def calls_per_cpu_s(server: Child, target: Any, seconds: float, connections: int) -> float:
    """Saturate `server`, and divide the calls answered in a window by the CPU time that it used in it."""
    with child("saturate", seconds, connections) as load:
        load.tell(target)
        load.read()  # It is warm.
        before = server.ask()
        calls = load.ask()
        after = server.ask()
    return calls / (after - before)


def latencies_ms(target: Any, seconds: float) -> list[float]:
    with child("arrivals", seconds, RATE) as load:
        load.tell(target)
        return sorted(load.read())


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each measurement")
    parser.add_argument("--connections", type=int, default=64, help="busy connections when saturating")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="gate-benchmark-") as folder,
        child("engine", f"{folder}/engine.sock") as engine,
    ):
        engine.read()
        with child("gate", f"{folder}/engine.sock", Path(folder) / "ledger") as gate:
            target = gate.read()
            rate = calls_per_cpu_s(gate, target, arguments.seconds, arguments.connections)
            print(f"gate: {rate:.0f} calls per CPU second", flush=True)
            added = latencies_ms(target, arguments.seconds)
            print(f"gate: {len(added)} calls at {RATE}/s, slowest {added[-1]:.2f} ms", flush=True)
        with child("fastapi") as bare:
            baseline = calls_per_cpu_s(bare, bare.read(), arguments.seconds, arguments.connections)
            print(f"fastapi: {baseline:.0f} calls per CPU second", flush=True)
    figures = {
        "calls_per_cpu_s": round(rate),
        "added_ms_p50": round(quantile(added, 0.5), 3),
        "added_ms_p99": round(quantile(added, 0.99), 3),
        "fastapi_calls_per_cpu_s": round(baseline),
        "ratio": round(rate / baseline, 3),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
