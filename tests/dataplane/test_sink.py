"""The token sink stages one call's tokens as one row, and lets calls that end together share a put."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import numpy as np
import pytest

from dataplane.errors import DataPlaneError, DataPlaneTimeout, RowExists
from dataplane.memory import MemoryPlane
from dataplane.plane import Row
from dataplane.schema import STAGING, STAGING_COLUMNS
from dataplane.sink import TokenDelta, TokenSink

pytestmark = pytest.mark.anyio

DELTA = TokenDelta(
    token_ids=np.array([5, 6, 7]),
    token_mask=np.array([0, 1, 1], np.uint8),
    logprobs=np.array([0, -0.5, -0.25], np.float32),
    weight_versions=np.array([4, 4, 4]),
)


async def test_a_staged_delta_is_one_row_of_the_staging_partition() -> None:
    plane = MemoryPlane()
    await TokenSink(plane).stage("r/0-abcdef01", DELTA)
    [got] = await plane.get(STAGING, ["r/0-abcdef01"], STAGING_COLUMNS)
    for column in STAGING_COLUMNS:
        np.testing.assert_array_equal(got[column], getattr(DELTA, column), strict=True)


async def test_a_key_is_staged_once() -> None:
    sink = TokenSink(MemoryPlane())
    await sink.stage("r/0-abcdef01", DELTA)
    with pytest.raises(RowExists):
        await sink.stage("r/0-abcdef01", DELTA)


class Gated(MemoryPlane):
    """A plane whose puts wait for a gate, and which keeps count of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = anyio.Event()
        self.puts: list[list[str]] = []
        self.failing: DataPlaneError | None = None

    async def put(self, partition: str, rows: Mapping[str, Row], *, timeout: float | None = None) -> None:
        self.puts.append(sorted(rows))
        await self.gate.wait()
        if self.failing is not None:
            raise self.failing
        await super().put(partition, rows, timeout=timeout)


async def test_stages_that_gather_behind_a_put_share_the_next_one() -> None:
    plane = Gated()
    sink = TokenSink(plane)
    async with anyio.create_task_group() as tg:
        for i in range(5):
            tg.start_soon(sink.stage, f"r/{i}-abcdef01", DELTA)
        await anyio.wait_all_tasks_blocked()
        plane.gate.set()
    first = len(plane.puts[0])
    assert [len(p) for p in plane.puts] in ([5], [first, 5 - first])
    assert await plane.keys(STAGING) == [f"r/{i}-abcdef01" for i in range(5)]


async def test_one_row_at_fault_fails_alone() -> None:
    plane = Gated()
    sink = TokenSink(plane)
    outcomes: dict[int, str] = {}

    async def stage(i: int, key: str) -> None:
        try:
            await sink.stage(key, DELTA)
            outcomes[i] = "staged"
        except RowExists:
            outcomes[i] = "exists"

    async with anyio.create_task_group() as tg:
        for i, key in enumerate(["a/0-1", "b/0-1", "c/0-1", "a/0-1", "d/0-1"]):
            tg.start_soon(stage, i, key)
        await anyio.wait_all_tasks_blocked()
        plane.gate.set()
    assert outcomes == {0: "staged", 1: "staged", 2: "staged", 3: "exists", 4: "staged"}


async def test_a_lost_put_fails_all_that_shared_it() -> None:
    plane = Gated()
    plane.failing = DataPlaneTimeout("put", partition=STAGING, seconds=1, outcome="unknown")
    sink = TokenSink(plane)
    failed: list[int] = []

    async def stage(i: int) -> None:
        with pytest.raises(DataPlaneTimeout):
            await sink.stage(f"r/{i}-abcdef01", DELTA)
        failed.append(i)

    async with anyio.create_task_group() as tg:
        for i in range(4):
            tg.start_soon(stage, i)
        await anyio.wait_all_tasks_blocked()
        plane.gate.set()
    assert sorted(failed) == [0, 1, 2, 3]


@pytest.mark.parametrize("victim", range(4))
async def test_a_cancelled_stage_takes_no_other_with_it(victim: int) -> None:
    plane = Gated()
    sink = TokenSink(plane)
    scopes = [anyio.CancelScope() for _ in range(4)]
    staged: set[int] = set()

    async def stage(i: int) -> None:
        with scopes[i]:
            await sink.stage(f"r/{i}-abcdef01", DELTA)
            staged.add(i)

    async with anyio.create_task_group() as tg:
        for i in range(4):
            tg.start_soon(stage, i)
        await anyio.wait_all_tasks_blocked()
        scopes[victim].cancel()
        await anyio.wait_all_tasks_blocked()
        plane.gate.set()
    assert staged | {victim} == {0, 1, 2, 3}
    await sink.stage("r/9-abcdef01", DELTA)
    assert {f"r/{i}-abcdef01" for i in staged} | {"r/9-abcdef01"} <= set(await plane.keys(STAGING))
