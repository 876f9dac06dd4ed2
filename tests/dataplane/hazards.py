"""What must not happen to the users of a data plane, whatever overlaps, freezes or is cancelled.

Each hazard brings about a situation and asserts what its users may rely on. `bare_on` names the storages on which
TransferQueue by itself breaks the promise: there the assertion fails.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import anyio
import numpy as np
import pytest
import torch
from anyio.to_thread import run_sync

from dataplane.conformance.cases import row
from dataplane.conformance.faults import running_loop
from dataplane.servers import Servers
from tests.dataplane.faults import frozen
from tests.dataplane.parties import Party, Stop, mooncake_replaced, quietly, stopped

EVERYWHERE = frozenset({"simple", "mooncake"})
FIND = "async_kv_retrieve_meta"
KEYS = [f"k{n}" for n in range(8)]  # in both storage units


@dataclass
class World:
    one: Party
    other: Party
    servers: Servers
    partition: str


@dataclass(frozen=True)
class Hazard:
    name: str
    happen: Callable[[World], Awaitable[None]]
    bare_on: frozenset[str] = field(default=EVERYWHERE)


HAZARDS: list[Hazard] = []


def hazard(*, bare_on: frozenset[str] = EVERYWHERE) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    def add(happen: Callable[[World], Awaitable[None]]) -> None:
        HAZARDS.append(Hazard(happen.__name__, happen, bare_on))

    return add


# Numbers of cleared rows are used again.


@hazard()
async def a_get_that_overlaps_a_clear_reads_no_other_row(world: World) -> None:
    one, other, partition = world.one, world.other, world.partition
    found: list[object] = []

    async def get() -> None:
        found.append(await one.found(partition, ["a"]))

    await one.put(partition, {"a": row(1)})
    async with anyio.create_task_group() as tasks, stopped(one.client, FIND) as stop:
        tasks.start_soon(get)
        await stop.reached()
        await other.clear(partition, ["a"])
        await other.put(partition, {"b": row(2)})
        stop.leave()
    assert found in ([None], [[1]])


@hazard()
async def a_late_clear_removes_no_other_row(world: World) -> None:
    one, other, partition = world.one, world.other, world.partition
    await one.put(partition, {"a": row(1)})
    async with anyio.create_task_group() as tasks, stopped(one.client, FIND) as stop:
        tasks.start_soon(one.clear, partition, ["a"])
        await stop.reached()
        await other.clear(partition, ["a"])
        await other.put(partition, {"b": row(2)})
        stop.leave()
    assert await other.found(partition, ["b"]) == [2]


@hazard()
async def a_late_note_is_not_on_another_row(world: World) -> None:
    one, other, partition = world.one, world.other, world.partition
    await one.put(partition, {"a": row(1)})
    async with anyio.create_task_group() as tasks, stopped(one.client, FIND) as stop:
        tasks.start_soon(quietly, partial(one.note, partition, "a", "note1"))
        await stop.reached()
        await other.clear(partition, ["a"])
        await other.put(partition, {"b": row(2)})
        stop.leave()
    assert await other.notes(partition, "b") == set()


@hazard(bare_on=frozenset({"simple"}))
async def a_late_put_is_acknowledged_only_if_its_row_is_there(world: World) -> None:
    one, other, partition = world.one, world.other, world.partition
    acknowledged: list[bool] = []

    async def put() -> None:
        acknowledged.append(await quietly(lambda: one.put(partition, {"a": row(1)})))

    async with anyio.create_task_group() as tasks, stopped(one.client, FIND, creating) as stop:
        tasks.start_soon(put)
        await stop.reached()
        await quietly(lambda: other.clear(partition, ["a"]))
        stop.leave()
    assert acknowledged == [await one.found(partition, ["a"]) == [1]]


@hazard(bare_on=frozenset({"simple"}))
async def a_row_has_no_column_of_a_late_put(world: World) -> None:
    one, other, partition = world.one, world.other, world.partition
    async with anyio.create_task_group() as tasks, stopped(one.client, FIND, creating) as stop:
        tasks.start_soon(
            quietly, lambda: one.put(partition, {"a": {"ids": np.ones(1, np.int64), "secret": np.ones(1, np.float32)}})
        )
        await stop.reached()
        await quietly(lambda: other.clear(partition, ["a"]))
        stop.leave()
    await other.put(partition, {"b": {"ids": np.full(1, 2)}})
    assert await other.found(partition, ["b"]) == [2]
    assert await other.found(partition, ["b"], "secret") is None


@hazard()
async def no_acknowledged_note_is_lost(world: World) -> None:
    one, other, partition = world.one, world.other, world.partition
    await one.put(partition, {"a": row(1)})
    noted: set[str] = set()

    async def note(party: Party, name: str) -> None:
        if await quietly(lambda: party.note(partition, "a", name)):
            noted.add(name)

    async with anyio.create_task_group() as tasks, stopped(one.client, FIND) as stop:
        tasks.start_soon(note, one, "note1")
        await stop.reached()
        await note(other, "note2")
        stop.leave()
    assert await one.notes(partition, "a") >= noted


def creating(*_: object, create: bool = False, **__: object) -> bool:
    return create


# Cancellations.


@hazard()
async def a_cancelled_clear_leaves_no_unreadable_key(world: World) -> None:
    one, partition = world.one, world.partition
    await one.put(partition, {key: row(1) for key in KEYS})
    async with stopped(one.client, "_mark_clearing_in_controller") as stop:
        await cancel_there(stop, one.clear(partition, KEYS))
    assert await one.unreadable(partition) == []
    await one.clear(partition, KEYS)
    assert await one.keys(partition) == []


@hazard()
async def a_cancelled_put_leaves_no_unreadable_key(world: World) -> None:
    one, partition = world.one, world.partition
    async with stopped(one.client, FIND, creating) as stop:
        await cancel_there(stop, one.put(partition, {key: row(1) for key in KEYS}))
    assert await one.unreadable(partition) == []


@hazard(bare_on=frozenset({"mooncake"}))
async def rows_can_be_cleared_in_whatever_state_they_are(world: World) -> None:
    one, other, partition = world.one, world.other, world.partition
    await one.put(partition, {"whole": row(1)})
    async with stopped(one.client, FIND, creating) as stop:
        await cancel_there(stop, one.put(partition, {"half": row(1)}))
    await quietly(lambda: other.clear(partition, ["whole", "half"]))
    assert await other.keys(partition) == []


@hazard(bare_on=frozenset({"mooncake"}))
async def the_rest_of_a_cancelled_put_is_on_no_other_row(world: World) -> None:
    one, other, partition = world.one, world.other, world.partition
    if world.servers.spec.backend != "mooncake":
        pytest.skip("its requests end when they are cancelled")
    reached, left = threading.Event(), threading.Event()

    def stopping(move: Callable[..., object], *arguments: object, **named: object) -> object:
        reached.set()
        left.wait(20)
        return move(*arguments, **named)

    async def put_again() -> None:
        await quietly(lambda: one.put(partition, {"a": row(3)}))
        reached.set()

    await one.put(partition, {"a": row(1)})
    with mooncake_replaced(one, batch_upsert_from=stopping):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put_again)
            await run_sync(reached.wait, 20)
            tasks.cancel_scope.cancel()
        await other.clear(partition, ["a"])
        await other.put(partition, {"b": row(2)})
        left.set()
        await anyio.sleep(0.5)
    assert await other.found(partition, ["b"]) == [2]


@hazard(bare_on=frozenset({"simple"}))
async def no_batch_is_torn_by_a_cancelled_put(world: World) -> None:
    one, partition = world.one, world.partition
    big = 250_000
    await one.put(partition, {key: row(1, big) for key in KEYS})
    async with stopped(*one.writing) as stop:
        with frozen(world.servers.pids["storage unit 1"]):  # the other one is done
            await cancel_there(stop, quietly(lambda: one.put(partition, {key: row(2, big) for key in KEYS})))
    assert await one.found(partition, KEYS) in ([1] * len(KEYS), [2] * len(KEYS), None)


async def cancel_there(stop: Stop, call: Awaitable[object]) -> None:
    async def run() -> None:
        try:
            await call
        finally:
            stop.passed()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await stop.reached()
        tasks.cancel_scope.cancel()
        stop.leave()


# Answers that are not true.


@hazard()
async def a_put_is_acknowledged_only_if_the_controller_heard_of_it(world: World) -> None:
    one, partition = world.one, world.partition
    manager = one.client.storage_manager

    async def unheard(_: object) -> None:
        """The controller's answer is waited for, for a while, and then done without."""

    manager._notify_and_wait = unheard
    try:
        acknowledged = await quietly(lambda: one.put(partition, {"a": row(1)}))
    finally:
        del manager._notify_and_wait
    assert acknowledged == (await one.found(partition, ["a"]) == [1])


@hazard()
async def a_put_is_acknowledged_only_if_its_values_are_kept(world: World) -> None:
    one, partition = world.one, world.partition
    await one.put(partition, {"a": {"x": np.array([1], np.int64)}})
    if await quietly(lambda: one.put(partition, {"b": {"x": np.array([1.5], np.float32)}})):
        assert await one.found(partition, ["a", "b"], "x") == [1, 1.5]


@hazard()
async def missing_rows_are_not_passed_over(world: World) -> None:
    one, partition = world.one, world.partition
    await one.put(partition, {"a": row(1), "b": row(2)})
    found = await one.found(partition, ["a", "nonesuch", "b"])
    assert found is None or len(found) == 3


@hazard()
async def missing_columns_are_not_passed_over(world: World) -> None:
    one, partition = world.one, world.partition
    await one.put(partition, {"a": row(1)})
    for columns in (["ids", "nonesuch"], ["nonesuch"]):
        try:
            rows = await one.get(partition, ["a"], columns)
        except Exception:
            continue
        assert [set(found) for found in rows] == [set(columns)]


@hazard(bare_on=frozenset({"mooncake"}))
async def a_key_that_is_asked_for_twice_has_one_value(world: World) -> None:
    one, partition = world.one, world.partition
    await one.put(partition, {key: row(n + 1) for n, key in enumerate(KEYS)})
    assert await one.found(partition, ["k0", "k1", "k0"]) == [1, 2, 1]


# Servers that do not answer.


@hazard()
async def a_call_ends_though_the_controller_stands_still(world: World) -> None:
    one, partition = world.one, world.partition
    await one.put(partition, {"a": row(1)})
    with frozen(world.servers.pids["controller"]):
        with anyio.move_on_after(3 * DEADLINE_S) as patience:
            await one.found(partition, ["a"])
    assert not patience.cancelled_caught


@hazard()
async def a_clear_is_acknowledged_only_if_the_storage_did_it(world: World) -> None:
    one, partition = world.one, world.partition
    await one.put(partition, {key: row(1) for key in KEYS})
    with storage_that_does_not_clear(world):
        acknowledged = await quietly(lambda: one.clear(partition, KEYS))
    assert not acknowledged


def storage_that_does_not_clear(world: World) -> AbstractContextManager[None]:
    if world.servers.spec.backend == "simple":
        return frozen(world.servers.pids["storage unit 1"])
    # Its master does that, and answers each name with a code, here as when it is not reached.
    return mooncake_replaced(world.one, batch_remove=lambda _, names, *__, **___: [-900] * len(names))


@hazard(bare_on=frozenset({"mooncake"}))
async def only_the_callers_wait_for_storage_that_stands_still(world: World) -> None:
    one, partition = world.one, world.partition
    await one.put(partition, {key: row(1) for key in KEYS})
    pids = [pid for name, pid in world.servers.pids.items() if name != "controller"]
    async with running_loop() as gaps:
        with frozen(*pids, at_most_s=3):
            with anyio.move_on_after(DEADLINE_S):
                await one.found(partition, KEYS)
    assert gaps, "the loop stood still with it"
    assert max(gaps) < 1.5


# The process that it runs in.


@hazard()
async def the_number_of_torch_threads_is_the_users(world: World) -> None:
    one, partition = world.one, world.partition
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    try:
        await one.put(partition, {"a": row(1)})
        assert await one.found(partition, ["a"]) == [1]
        assert torch.get_num_threads() == before + 2
    finally:
        torch.set_num_threads(before)


DEADLINE_S = 1.0
"""Of the planes, and of TransferQueue's requests to storage."""
