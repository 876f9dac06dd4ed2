"""What the servers' memory holds on to: the rows that live, not the batches that they came in."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import interface

from dataplane.conformance.cases import row
from dataplane.servers import Servers
from dataplane.transferqueue import TransferQueuePlane
from tests.dataplane.backends import on_each_backend_in_time
from tests.dataplane.parties import bare

pytestmark = pytest.mark.anyio

ROW_BYTES = 2**20


async def growth(
    servers: Servers, batches: int, rows: int, put: Callable[[list[str]], Awaitable[object]],
    clear: Callable[[Sequence[str]], Awaitable[object]],
) -> tuple[int, int]:  # fmt: skip
    """How many bytes the servers have grown by batches of which all rows but one are cleared, and how many may be."""

    async def batch(number: int) -> None:
        keys = [f"{number}/{n}" for n in range(rows)]
        await put(keys)
        await clear(keys[1:])

    await batch(0)
    before = resident(servers)
    for number in range(1, 1 + batches):
        await batch(number)
    return resident(servers) - before, int(1.3 * batches * ROW_BYTES) + 64 * 2**20


def resident(servers: Servers) -> int:
    stats = [Path(f"/proc/{pid}/statm").read_text().split() for pid in servers.pids.values()]
    return sum(int(stat[1]) for stat in stats) * os.sysconf("SC_PAGE_SIZE")


@on_each_backend_in_time
async def test_a_surviving_row_keeps_no_batch(servers: Servers, plane: TransferQueuePlane, partition: str) -> None:
    async def put(keys: list[str]) -> None:
        await plane.put(partition, {key: row(1, length=ROW_BYTES // 12) for key in keys})

    async def clear(keys: Sequence[str]) -> None:
        assert await plane.clear(partition, keys) == len(keys)

    batches = 6 if servers.spec.mooncake is None else 4
    grown, bound = await growth(servers, batches, 128, put, clear)
    assert len(await plane.keys(partition)) == batches + 1
    if servers.spec.backend == "simple":  # of Mooncake, 512 MiB are lent from the start: five batches would not fit
        assert grown <= bound
    await plane.clear(partition, await plane.keys(partition))


async def test_with_transferqueue_by_itself_it_does(bare_servers: Servers, partition: str) -> None:
    async with bare(bare_servers.spec, 1) as [party]:

        async def put(keys: list[str]) -> None:
            interface._TQ_CLIENT = party.client
            columns: Any = {"x": torch.ones(len(keys), ROW_BYTES // 4)}
            fields = TensorDict(columns, batch_size=len(keys))
            await tq.async_kv_batch_put(keys=keys, partition_id=partition, fields=fields)

        grown, bound = await growth(bare_servers, 3, 64, put, lambda keys: party.clear(partition, keys))
        assert grown > bound
        await party.clear(partition, await party.keys(partition))
