"""What TransferQueue lets slip and the plane does not; and planes among themselves: several, in several processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from typing import Any

import anyio
import msgspec
import pytest
import ray

from dataplane.codec import pack
from dataplane.conformance.cases import row, values
from dataplane.errors import DataPlaneDown, DataPlaneError, RowExists, RowGone, RowMismatch
from dataplane.spec import PlaneSpec, connect
from dataplane.store import Store
from dataplane.transferqueue import TransferQueuePlane, _connect_store

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(spec: PlaneSpec) -> Any:
    """Another client, without the plane's guards."""
    store = await _connect_store(spec)
    yield store
    store.close()


async def test_another_keys_row_is_never_returned(store: Store, plane: TransferQueuePlane, partition: str) -> None:
    await plane.put(partition, {"a": row(1)})
    meta = await store.find(partition, ["a"])
    await store.write(meta, pack(partition, {"b": row(2)}))  # as a late request for a recycled row number does
    with pytest.raises(RowMismatch) as raised:
        await plane.get(partition, ["a"], ["ids"])
    assert raised.value.keys == ("a",)


@pytest.mark.parametrize("released", [False, True])
async def test_memory_that_is_cleared_while_it_is_read_is_no_row(
    plane: TransferQueuePlane, partition: str, released: bool
) -> None:
    """Where a read copies from memory that another process may free and write: in the middle of its clear, when the
    row is unreadable and still occupies its key, and after it."""
    await plane.put(partition, {"a": row(1), "b": row(2)})
    own: Any = plane._store
    read = own.read

    async def read_while_another_clears(meta: Any, columns: Any) -> Any:
        found = await read(meta, columns)
        if released:
            await own.erase(await own.find(partition, ["a"]))
        else:
            await own._client._mark_clearing_in_controller(meta)
        return found

    own.reads_in_place, own.read = True, read_while_another_clears
    with pytest.raises(RowGone, match="cleared while it was being read"):
        await plane.get(partition, ["a", "b"], ["ids"])


async def test_a_released_row_number_is_not_used_again_soon(
    store: Store, plane: TransferQueuePlane, partition: str
) -> None:
    [released] = (await store.create(partition, ["old"])).global_indexes
    meta = await store.find(partition, ["old"])
    assert await plane.clear(partition, ["old"]) == 1
    news = [f"new {n}" for n in range(1000)]
    assert released not in (await store.create(partition, news)).global_indexes
    await store.write(meta, pack(partition, {"old": row(1)}))  # the old key's put arrives late
    with pytest.raises(RowGone):
        await plane.get(partition, news[:20], ["ids"])
    assert await plane.clear(partition, news) == 1000


async def test_a_key_occupied_by_a_crashed_put_is_listed_and_can_be_freed(
    store: Store, plane: TransferQueuePlane, partition: str
) -> None:
    await plane.put(partition, {"whole": row(1)})
    await store.create(partition, ["half"])
    assert await plane.keys(partition) == ["half", "whole"]
    with pytest.raises(RowGone) as gone:
        await plane.get(partition, ["whole", "half"], ["ids"])
    assert gone.value.keys == ("half",)
    with pytest.raises(RowExists):
        await plane.put(partition, {"half": row(1)})
    assert await plane.clear(partition, ["half", "whole"]) == 2
    await plane.put(partition, {"half": row(2)})


async def test_a_put_that_the_controller_did_not_hear_of_fails_and_is_taken_back(
    plane: TransferQueuePlane, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unheard(*_: object) -> None:
        """What TransferQueue's notice amounts to when the controller refuses it, or does not answer in time."""

    store: Any = plane._store
    with monkeypatch.context() as patch:
        patch.setattr(store._client.storage_manager, "notify_data_update", unheard)
        with pytest.raises(DataPlaneError, match="did not make the rows readable"):
            await plane.put(partition, {"a": row(1), "b": row(1)})
    assert await plane.keys(partition) == []
    await plane.put(partition, {"a": row(2)})
    assert await values(plane, partition, ["a"]) == [2]


async def test_a_plane_counts_and_times_what_it_does(plane: TransferQueuePlane, partition: str) -> None:
    plane.take_metrics()
    await plane.put(partition, {"a": row(1)})
    for _ in range(2):
        await values(plane, partition, ["a"])
    await plane.clear(partition, ["a"])
    metrics = plane.take_metrics()
    calls = {name: int(metrics[f"{name}_calls"]) for name in ("put", "get", "clear", "encode", "decode")}
    assert calls == {"put": 1, "get": 2, "clear": 1, "encode": 1, "decode": 2}
    assert 0 < metrics["decode_s"] < metrics["get_s"] <= 2 * metrics["get_max_s"]
    assert plane.take_metrics() == {"retries": 0, "unsettled": 0, "owed": 0}


async def test_planes_of_one_process_are_independent(spec: PlaneSpec, partition: str) -> None:
    first, second = await connect(spec), await connect(spec)
    await first.put(partition, {"a": row(1)})
    assert await values(second, partition, ["a"]) == [1]
    await first.aclose()
    assert await values(second, partition, ["a"]) == [1]
    assert await second.clear(partition, ["a"]) == 1
    await second.aclose()
    assert not [thread.name for thread in threading.enumerate() if "dataplane" in thread.name]
    assert not ray.is_initialized()


async def test_a_plane_can_be_used_from_another_event_loop(plane: TransferQueuePlane, partition: str) -> None:
    await plane.put(partition, {"a": row(1)})

    async def elsewhere() -> list[int]:
        return await values(plane, partition, ["a"])

    assert await anyio.to_thread.run_sync(anyio.run, elsewhere) == [1]


async def test_another_process_attaches_with_the_spec_as_json(
    spec: PlaneSpec, plane: TransferQueuePlane, partition: str
) -> None:
    script = """
import sys, anyio, msgspec
from dataplane.spec import PlaneSpec, connect
from dataplane.conformance.cases import row, values

async def main(spec, partition):
    plane = await connect(spec)
    assert await values(plane, partition, ["mine"]) == [1]
    await plane.put(partition, {"yours": row(2)})
    await plane.aclose()

anyio.run(main, msgspec.json.decode(sys.argv[1], type=PlaneSpec), sys.argv[2])
"""
    await plane.put(partition, {"mine": row(1)})
    encoded = msgspec.json.encode(spec).decode()
    with anyio.fail_after(60):
        await anyio.run_process([sys.executable, "-c", script, encoded, partition], stderr=subprocess.STDOUT)
    assert await values(plane, partition, ["mine", "yours"]) == [1, 2]


async def test_a_forked_process_is_told_to_connect_its_own(
    plane: TransferQueuePlane, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(DataPlaneDown, match="forked"):
            await plane.keys(partition)
    assert await plane.keys(partition) == []


def test_a_plane_serves_a_loop_that_anyio_did_not_start(spec: PlaneSpec, partition: str) -> None:
    async def use() -> None:
        plane = await connect(spec)
        await plane.put(partition, {"a": row(1)})
        assert (await plane.get(partition, ["a"], ["ids"]))[0]["ids"].size > 0
        assert await plane.clear(partition, ["a"]) == 1
        await plane.aclose()

    asyncio.run(asyncio.wait_for(use(), 60))
