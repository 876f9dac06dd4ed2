"""Calls that are cancelled at random moments. A process too: `python -m tests.dataplane.cancelling SPEC PARTITION NAME`."""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import torch

from dataplane.conformance.cases import row
from dataplane.errors import RowExists, RowGone
from dataplane.plane import DataPlane
from dataplane.spec import PlaneSpec, connect

CALLS = 500
AT_ONCE = 4
LATEST_S = 0.03


async def cancel_at_random(plane: DataPlane, partition: str, name: str) -> None:
    """500 puts, gets and clears on keys that begin with `name`, each cancelled within 30 ms if it takes so long.

    Asserts that they leave this process its threads and its descriptors.
    """
    dice = random.Random(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 2)
    await plane.put(partition, {f"{name} warm": row(0)})
    descriptors = count_descriptors()

    async def call(number: int) -> None:
        keys = [f"{name} {prefix}{number % 20}" for prefix in "ab"]
        with anyio.move_on_after(dice.random() * LATEST_S), suppress(RowExists, RowGone):
            kind = dice.randrange(3)
            if kind == 0:
                await plane.put(partition, {key: row(number) for key in keys})
            elif kind == 1:
                await plane.get(partition, keys, ["ids"])
            else:
                await plane.clear(partition, keys)

    for start in range(0, CALLS, AT_ONCE):
        async with anyio.create_task_group() as tasks:
            for number in range(start, start + AT_ONCE):
                tasks.start_soon(call, number)
    assert count_descriptors() < descriptors + 30  # a cancelled request's socket is closed, not kept
    assert torch.get_num_threads() == threads + 2
    torch.set_num_threads(threads)


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def main(spec: PlaneSpec, partition: str, name: str) -> None:
    plane = await connect(spec)
    await cancel_at_random(plane, partition, name)
    await plane.aclose()


if __name__ == "__main__":
    anyio.run(main, msgspec.json.decode(sys.argv[1], type=PlaneSpec), *sys.argv[2:])
