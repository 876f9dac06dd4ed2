"""What the data plane costs, and what the loop feels of it, beside TransferQueue by itself.

    python -m benchmarks.dataplane

Three sides do the same with the same servers (a controller and two storage units, processes of their own): `adapter` is
the plane; `native` awaits `transfer_queue.async_kv_*` on the loop; `sync` calls `transfer_queue.kv_*` on the loop. Each has
a process of its own, with uvloop, the controller's settings, and the same settings of TransferQueue. TransferQueue's sides
are given batches that are ready to be sent and keep what they receive as it came; the adapter takes and returns rows, and
verifies them, in the time that is measured. Rows have the columns of the train partition.

The last line is JSON. `*_max_lag_ms`: the loop's largest delay in puts, gets and clears of 256 rows of 2k tokens, and of an
idle loop. `adapter_over_native_p50`: the same three calls together, by the sums of their medians. `clear_4096_loop_ms`: the
largest delay while the adapter clears 4,096 rows in one call. `frozen_max_lag_ms`: the adapter's while a server stands still
(SIGSTOP) in each kind of call. `table`: every figure of every side, by rows x tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import anyio
import msgspec

from benchmarks.dataplane_sides import Task
from dataplane.servers import start_servers

SIDES = ("sync", "native", "adapter")
HEADLINE = "256 x 2k"
HANG_GUARD_S = 600


async def measure() -> dict[str, Any]:
    table: dict[str, Any] = {}
    async with start_servers(storage_units=2, timeout_s=120) as servers:
        task = msgspec.json.encode(Task(servers.spec, dict(servers.pids)))
        for side in SIDES:
            with anyio.fail_after(HANG_GUARD_S):
                ended = await anyio.run_process(
                    [sys.executable, "-m", "benchmarks.dataplane_sides", side], input=task + b"\n", stderr=None
                )
            table[side] = json.loads(ended.stdout)
            show(side, table[side])
    return {
        **{f"{side}_max_lag_ms": worst(table[side]["healthy"][HEADLINE]) for side in SIDES},
        "idle_max_lag_ms": table["adapter"]["idle"]["max_lag_ms"],
        "adapter_over_native_p50": round(cycle(table["adapter"]) / cycle(table["native"]), 3),
        "clear_4096_loop_ms": table["adapter"]["clear_4096"]["max_lag_ms"],
        "frozen_max_lag_ms": max(map(worst, table["adapter"]["frozen"].values())),
        "table": table,
    }


def worst(calls: dict[str, Any]) -> float:
    return max(call["max_lag_ms"] for call in calls.values())


def cycle(side: dict[str, Any]) -> float:
    return sum(call["p50_ms"] for call in side["healthy"][HEADLINE].values())


def show(side: str, found: dict[str, Any]) -> None:
    idle = found["idle"]
    print(f"{side}: an idle loop's lag {idle['max_lag_ms']:.1f} ms, p99.9 {idle['p999_lag_ms']:.1f} ms", flush=True)
    for cell, calls in found["healthy"].items():
        for name, call in calls.items():
            line(f"{cell:>9} {name:<5}", call)
    line("4096 rows clear", found["clear_4096"])
    for server, calls in found["frozen"].items():
        for name, call in calls.items():
            line(f"{server} frozen, {name:<5}", call)


def line(head: str, call: dict[str, float]) -> None:
    rate = f"{call['mb_per_s']:8.1f} MB/s" if "mb_per_s" in call else " " * 13
    print(
        f"  {head:<34} p50 {call['p50_ms']:8.2f} ms  max {call['max_ms']:8.2f} ms {rate}"
        f"  lag: max {call['max_lag_ms']:8.2f} ms, p99.9 {call['p999_lag_ms']:8.2f} ms",
        flush=True,
    )


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    print(json.dumps(anyio.run(measure)), flush=True)


if __name__ == "__main__":
    main()
