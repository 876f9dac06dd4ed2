"""Servers freeze and calls are cancelled: every call ends in bounded time, and no key is left unreadable yet occupied."""

from __future__ import annotations

import sys
from collections.abc import Awaitable

import anyio
import msgspec
import pytest

from dataplane.conformance.cases import row, values
from dataplane.conformance.faults import running_loop
from dataplane.errors import DataPlaneTimeout
from dataplane.servers import Servers
from dataplane.spec import PlaneSpec
from dataplane.transferqueue import TransferQueuePlane
from tests.dataplane.backends import on_each_backend, on_each_backend_in_time
from tests.dataplane.cancelling import cancel_at_random
from tests.dataplane.faults import frozen, serving

pytestmark = pytest.mark.anyio

KEYS = ["a", "b", "c", "d"]
ROWS = {key: row(i) for i, key in enumerate(KEYS)}  # enough to reach both storage units
each_server = pytest.mark.parametrize("server", ["controller", "storage unit 0", "storage unit 1"])


@each_server
async def test_a_call_to_a_frozen_server_times_out_and_the_plane_recovers(
    server: str, servers: Servers, plane: TransferQueuePlane, partition: str
) -> None:
    await plane.put(partition, {"old " + key: row(9) for key in KEYS})
    await plane.put(partition, ROWS)
    calls: dict[str, Awaitable[object]] = {
        "get": plane.get(partition, KEYS, ["ids"], timeout=0.3),
        "put": plane.put(partition, {"new " + key: row(1) for key in KEYS}, timeout=0.3),
        "clear": plane.clear(partition, ["old " + key for key in KEYS], timeout=0.3),
    }
    async with running_loop() as gaps:
        with frozen(servers.pids[server]):
            for name, call in calls.items():
                gaps.clear()
                with anyio.fail_after(10), pytest.raises(DataPlaneTimeout, match=name) as raised:
                    await call
                assert raised.value.outcome == ("none" if name == "get" else "unknown")
                assert len(gaps) > 10  # it waited, and the caller's loop went on
            assert plane.unsettled == 2

    # Later calls on the same keys wait for what is still under way: the put is taken back, the clear takes effect.
    with anyio.fail_after(30):
        assert await values(plane, partition, KEYS) == [0, 1, 2, 3]
        await plane.put(partition, {"new " + key: row(2) for key in KEYS})
        assert await plane.keys(partition) == [*KEYS, *("new " + key for key in KEYS)]
    assert plane.unsettled == 0


async def test_listing_keys_on_a_frozen_controller_times_out(
    servers: Servers, plane: TransferQueuePlane, partition: str
) -> None:
    with frozen(servers.pids["controller"]), pytest.raises(DataPlaneTimeout):
        await plane.keys(partition, timeout=0.2)
    assert await plane.keys(partition) == []


async def test_a_write_that_waits_behind_an_unknown_one_times_out_without_effect(
    servers: Servers, plane: TransferQueuePlane, partition: str
) -> None:
    with frozen(servers.pids["controller"]):
        with pytest.raises(DataPlaneTimeout):
            await plane.put(partition, ROWS, timeout=0.2)
        with pytest.raises(DataPlaneTimeout) as raised:
            await plane.put(partition, {"a": row(7)}, timeout=0.2)
        assert raised.value.outcome == "none"
    await plane.put(partition, {"a": row(8)})
    assert await values(plane, partition, ["a"]) == [8]
    assert await plane.keys(partition) == ["a"]


@each_server
async def test_a_cancelled_write_ends_before_its_cancellation_is_delivered(
    server: str, servers: Servers, plane: TransferQueuePlane, partition: str
) -> None:
    over = anyio.Event()

    async def put() -> None:
        try:
            await plane.put(partition, ROWS)
        finally:
            over.set()

    async with anyio.create_task_group() as tasks:
        with frozen(servers.pids[server]):
            tasks.start_soon(put)
            await anyio.sleep(0.2)
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.2)
            assert not over.is_set()
    assert await values(plane, partition, KEYS) == [0, 1, 2, 3]


@each_server
async def test_a_cancelled_get_leaves_at_once(
    server: str, servers: Servers, plane: TransferQueuePlane, partition: str
) -> None:
    await plane.put(partition, ROWS)
    with frozen(servers.pids[server]):
        with anyio.fail_after(10), anyio.move_on_after(0.1) as scope:
            await plane.get(partition, KEYS, ["ids"])
        assert scope.cancelled_caught
    assert await values(plane, partition, KEYS) == [0, 1, 2, 3]


@on_each_backend_in_time
async def test_a_thousand_random_cancellations_leave_only_readable_or_free_keys(
    spec: PlaneSpec, plane: TransferQueuePlane, partition: str
) -> None:
    command = [sys.executable, "-m", "tests.dataplane.cancelling", msgspec.json.encode(spec).decode(), partition]
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: anyio.run_process([*command, "theirs"], stderr=None))
            await cancel_at_random(plane, partition, "ours")

    left = await plane.keys(partition)
    assert {"ours warm", "theirs warm"} < set(left)
    assert len(await plane.get(partition, left, ["ids", "logprobs"])) == len(left)
    assert await plane.clear(partition, left) == len(left)
    assert await plane.keys(partition) == []
    assert plane.unsettled == 0
    assert plane.take_metrics()["owed"] == 0


@pytest.mark.long
@on_each_backend
async def test_storage_that_stands_still_within_the_deadline_costs_nothing_but_time(
    servers: Servers, plane: TransferQueuePlane, partition: str
) -> None:
    old = ["old " + key for key in KEYS]
    await plane.put(partition, ROWS)
    await plane.put(partition, dict.fromkeys(old, row(9)))
    found: list[list[int]] = []

    async def get() -> None:
        found.append(await values(plane, partition, KEYS))

    async with anyio.create_task_group() as tasks:
        with frozen(servers.pids["storage unit 0"], servers.pids["storage unit 1"]):
            tasks.start_soon(get)
            tasks.start_soon(plane.put, partition, {"new " + key: row(5) for key in KEYS})
            tasks.start_soon(plane.clear, partition, old)
            await anyio.sleep(12)  # longer than Mooncake keeps for a reader what it reads
    assert found == [[0, 1, 2, 3]]
    assert await plane.keys(partition) == [*KEYS, *("new " + key for key in KEYS)]


@pytest.mark.long
@on_each_backend
@pytest.mark.parametrize("server", ["controller", "storage"])
async def test_ten_seconds_of_standing_still_cost_the_callers_their_deadlines_only(
    server: str, servers: Servers, plane: TransferQueuePlane, partition: str
) -> None:
    # The one that all three calls need: of Mooncake's storage a clear asks nothing.
    storage = "storage unit 1" if servers.spec.mooncake is None else "Mooncake master"
    name = {"controller": "controller", "storage": storage}[server]
    new = {"new " + key: row(5) for key in KEYS}
    old = ["old " + key for key in KEYS]
    await plane.put(partition, ROWS)
    await plane.put(partition, dict.fromkeys(old, row(9)))
    late: list[float] = []

    async def times_out(call: Awaitable[object]) -> None:
        began = anyio.current_time()
        with pytest.raises(DataPlaneTimeout):
            await call
        late.append(anyio.current_time() - began - 1.0)

    async with running_loop() as gaps:
        with frozen(serving(servers.pids[name])):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(times_out, plane.get(partition, KEYS, ["ids"], timeout=1.0))
                tasks.start_soon(times_out, plane.put(partition, new, timeout=1.0))
                tasks.start_soon(times_out, plane.clear(partition, old, timeout=1.0))
                await anyio.sleep(10)
    assert len(late) == 3
    # What the machine itself held up is not the plane's.
    assert max(late) < 0.2 + max(gaps)
    assert max(gaps) < 0.5
    with anyio.fail_after(60):
        assert await values(plane, partition, KEYS) == [0, 1, 2, 3]
        await plane.put(partition, new)
        assert await plane.keys(partition) == [*KEYS, *new]
        assert plane.unsettled == 0
