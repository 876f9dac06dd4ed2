"""Does to the fakes of a run what its schedule says, when it says it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import anyio
import msgspec
import numpy as np

from dataplane.errors import DataPlaneTimeout, RowMismatch
from dataplane.plane import Row
from dataplane.schema import STAGING
from ledger.records import CallReply
from tests.chaos.schedule import Fault, Schedule
from tests.fakes.house import FakeHouse
from workers.generation.engine import Generation


async def inflict(house: FakeHouse, schedule: Schedule) -> None:
    """Run beside the house's `play`."""
    began = anyio.current_time()
    async with anyio.create_task_group() as tg:
        for number, fault in enumerate(schedule.faults):
            await anyio.sleep(max(0.0, began + fault.at_s - anyio.current_time()))
            tg.start_soon(_inflict, house, fault, random.Random(f"{schedule.seed}/{number}"))


async def _inflict(house: FakeHouse, fault: Fault, rng: random.Random) -> None:
    worker = house.workers[fault.target]
    engine = house.engines[worker.name]
    store, trainer = house.store, house.trainer

    def hit() -> bool:
        return rng.random() < fault.share

    match fault.kind:
        case "kill worker":
            worker.kill()
        case "freeze worker":
            worker.freeze()
            await anyio.sleep(fault.seconds)
            worker.thaw()
        case "slow worker":
            worker.slow(rng.uniform(2, 20))
            await anyio.sleep(fault.seconds)
            worker.slow(1.0)
        case "wedge engine":
            engine.wedged = True
            engine.set_pace()
            await anyio.sleep(fault.seconds)
            engine.wedged = False
            engine.set_pace()
        case "engine dies":
            engine.die()
            await anyio.sleep(1)
            worker.kill()
        case "engine forgets weights":
            engine.weight_version = 0
        case "engine refuses weights":
            with _set(engine, "refuses_weights", hit):
                await anyio.sleep(fault.seconds)
        case "replies get lost":
            with _set(worker, "loses_reply", lambda method: hit()):
                await anyio.sleep(fault.seconds)
        case "replies are garbage":
            with _set(worker, "spoils_reply", lambda method, reply: b"\xc1" if hit() else reply):
                await anyio.sleep(fault.seconds)
        case "replies name other tokens":
            with _set(worker, "spoils_reply", lambda method, reply: _other(rng, reply) if hit() else reply):
                await anyio.sleep(fault.seconds)
        case "logprobs are not finite":
            with _set(engine, "spoils", lambda _, generation: _nan(generation) if hit() else generation):
                await anyio.sleep(fault.seconds)
        case "worker does not start":
            worker.start_fails = 2
            worker.kill()
        case "slow trainer":
            trainer.slow(rng.uniform(2, 6))
            await anyio.sleep(fault.seconds)
            trainer.slow(1.0)
        case "freeze trainer":
            trainer.freeze()
            await anyio.sleep(fault.seconds)
            trainer.thaw()
        case "kill trainer":
            trainer.kill()
        case "trainer's replies get lost":
            with _set(trainer, "loses_reply", lambda method: hit()):
                await anyio.sleep(fault.seconds)
        case "slow storage":
            store.slowness = rng.uniform(10, 500)
            await anyio.sleep(fault.seconds)
            store.slowness = 1.0
        case "freeze storage":
            store.freeze()
            await anyio.sleep(fault.seconds)
            store.thaw()
        case "kill storage":
            store.kill()
        case "staged rows are altered":
            with _set(store, "spoils", lambda p, _, row: _altered(rng, row) if p == STAGING and hit() else row):
                await anyio.sleep(fault.seconds)
        case "staged rows get lost":
            before = store.ghosts.setdefault(STAGING, set())
            for key in await store.rows.keys(STAGING):
                if hit():
                    await store.rows.clear(STAGING, [key])
                    before.add(key)
        case "reads fail":
            with _set(store, "refuses", lambda op, p, keys: _fails(rng, op, p, keys) if hit() else None):
                await anyio.sleep(fault.seconds)
        case "puts fail":
            with _set(store, "refuses", lambda op, p, keys: _late(op, "put", p) if hit() else None):
                await anyio.sleep(fault.seconds)
        case "clears fail":
            with _set(store, "refuses", lambda op, p, keys: _late(op, "clear", p) if hit() else None):
                await anyio.sleep(fault.seconds)
        case "environment sleeps":
            house.environment.asleep_until = anyio.current_time() + fault.seconds
        case "environment raises":
            with _set(house.environment, "raises", hit):
                await anyio.sleep(fault.seconds)


@contextmanager
def _set(thing: Any, name: str, value: Callable[..., Any]) -> Generator[None]:
    """Of faults that overlap, the last one counts, and none outlives itself."""
    sound = getattr(thing, f"sound {name}", None) or getattr(thing, name)
    setattr(thing, f"sound {name}", sound)
    setattr(thing, name, value)
    try:
        yield
    finally:
        if getattr(thing, name) is value:
            setattr(thing, name, sound)


def _other(rng: random.Random, reply: bytes) -> bytes:
    """A reply of another call, or about other tokens than were staged."""
    try:
        whole = msgspec.msgpack.decode(reply, type=CallReply)
    except msgspec.DecodeError:
        return reply
    coords = whole.coords
    changed = rng.choice(
        (
            {"call_id": "g999999.0/0"},
            {"digest": "0" * 64},
            {"chain_hash": "0" * 64},
            {"cumulative_hash": "0" * 64},
            {"delta_len": coords.delta_len + 1},
            {"staging_key": f"{coords.staging_key}0"},
        )
    )
    return msgspec.msgpack.encode(msgspec.structs.replace(whole, coords=msgspec.structs.replace(coords, **changed)))


def _nan(generation: Generation) -> Generation:
    return replace(generation, logprobs=[math.nan, *generation.logprobs[1:]])


def _altered(rng: random.Random, row: Row) -> Row:
    name = rng.choice(sorted(row))
    column = row[name].copy()
    index = rng.randrange(len(column))
    match rng.choice(("value", "value", "shorter", "nan")):
        case "value":
            column[index] = column[index] + np.asarray(1, column.dtype)
        case "shorter" if len(column) > 1:
            column = column[:-1]
        case _ if column.dtype == np.float32:
            column[index] = np.nan
        case _:
            column[index] = 0
    return {**row, name: column}


def _fails(rng: random.Random, operation: str, partition: str, keys: Sequence[str]) -> None:
    if operation == "get" and partition == STAGING:
        if rng.random() < 0.5:
            raise DataPlaneTimeout("get", partition=partition, seconds=5, outcome="none")
        raise RowMismatch("the plane returned another key's row", partition=partition, keys=[rng.choice(list(keys))])


def _late(operation: str, wanted: Literal["put", "clear"], partition: str) -> None:
    if operation == wanted:
        raise DataPlaneTimeout(operation, partition=partition, seconds=5, outcome="none")
