"""Keys that must be free become free, whatever fails on the way, and nothing else is cleared by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.managers import simple_storage_manager

from dataplane import janitor
from dataplane.conformance.cases import row, values
from dataplane.errors import DataPlaneError, DataPlaneTimeout, RowExists, RowGone
from dataplane.metrics import Metrics
from dataplane.ragged import Batch
from dataplane.row_store import RowStore
from dataplane.servers import Servers
from dataplane.spec import connect
from dataplane.store import NoAnswer
from dataplane.transferqueue import TransferQueuePlane
from tests.dataplane.backends import on_each_backend_in_time
from tests.dataplane.faults import frozen

KEYS = ["a", "b", "c", "d"]


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "FIRST_PAUSE_S", 0.05)


async def all_settled(plane: TransferQueuePlane) -> None:
    with anyio.fail_after(30):
        while plane.take_metrics()["owed"]:
            await anyio.sleep(0.05)


class Failing:
    """The next calls of a store's verb fail; with `after`, having taken effect."""

    def __init__(self, plane: TransferQueuePlane, verb: str, times: int, *, after: bool = False) -> None:
        self._store: Any = plane._store
        self._verb, self._times, self._after = verb, times, after
        self._original = getattr(self._store, verb)
        setattr(self._store, verb, self)

    async def __call__(self, *arguments: Any) -> Any:
        if self._times == 0:
            return await self._original(*arguments)
        self._times -= 1
        if self._after:
            await self._original(*arguments)
        raise NoAnswer("not now")


@on_each_backend_in_time
@pytest.mark.anyio
async def test_a_clear_that_failed_is_done_later(plane: TransferQueuePlane, partition: str) -> None:
    await plane.put(partition, {key: row(1) for key in KEYS})
    Failing(plane, "erase", times=2)
    with pytest.raises(DataPlaneTimeout) as raised:
        await plane.clear(partition, KEYS)
    assert raised.value.outcome == "unknown"
    assert plane.take_metrics()["owed"] == len(KEYS)
    with pytest.raises(RowGone):
        await plane.get(partition, KEYS, ["ids"])
    await all_settled(plane)
    assert await plane.keys(partition) == []


@on_each_backend_in_time
@pytest.mark.anyio
async def test_a_put_that_could_not_be_taken_back_is_taken_back_later(
    plane: TransferQueuePlane, partition: str
) -> None:
    Failing(plane, "write", times=1, after=True)
    Failing(plane, "erase", times=2)
    with pytest.raises(DataPlaneTimeout):
        await plane.put(partition, {key: row(1) for key in KEYS})
    with pytest.raises(RowGone):
        await plane.get(partition, KEYS, ["ids"])
    await all_settled(plane)
    assert await plane.keys(partition) == []


@on_each_backend_in_time
@pytest.mark.anyio
async def test_a_row_that_was_put_meanwhile_is_not_cleared(plane: TransferQueuePlane, partition: str) -> None:
    await plane.put(partition, {"a": row(1), "b": row(1)})
    Failing(plane, "erase", times=1)
    with pytest.raises(DataPlaneTimeout):
        await plane.clear(partition, ["a", "b"])
    await plane.put(partition, {"a": row(2)})  # which clears the old one first
    await all_settled(plane)
    assert await values(plane, partition, ["a"]) == [2]
    assert await plane.keys(partition) == ["a"]


@pytest.mark.anyio
async def test_rows_of_a_storage_unit_that_stood_still_are_freed_when_it_goes_on(
    servers: Servers, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simple_storage_manager, "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", 1)
    plane = await connect(servers.spec)
    assert isinstance(plane, TransferQueuePlane)
    await plane.put(partition, {key: row(1) for key in KEYS})
    plane.take_metrics()
    with frozen(servers.pids["storage unit 1"]):
        with pytest.raises(DataPlaneTimeout, match="clear"):  # three requests had no answer
            await plane.clear(partition, KEYS, timeout=20)
        metrics = plane.take_metrics()
        assert metrics["retries"] >= 2
        assert metrics["owed"] == len(KEYS)
        assert metrics["timeouts"] == metrics["clear_calls"] == 1
    await all_settled(plane)
    assert await plane.keys(partition) == []
    await plane.aclose()


class FaultyStore:
    """A store in memory, whose calls fail as the faults say, one for each: before they take effect, or after."""

    reads_in_place = True

    def __init__(self) -> None:
        self.retries = 0
        self.rows: dict[str, tuple[int, dict[str, torch.Tensor] | None]] = {}
        self.faults: list[str] = []
        self._next = 0

    async def find(self, partition: str, keys: Sequence[str]) -> BatchMeta:
        with self._call():
            return self._meta(partition, [key for key in keys if key in self.rows])

    async def names(self, partition: str, meta: BatchMeta) -> list[str]:
        with self._call():
            return [key for key, (index, _) in self.rows.items() if index in meta.global_indexes]

    async def create(self, partition: str, keys: Sequence[str]) -> BatchMeta:
        with self._call():
            for key in keys:
                self.rows[key] = (self._next, None)
                self._next += 1
            return self._meta(partition, keys)

    async def write(self, meta: BatchMeta, batch: Batch) -> None:
        with self._call():
            for position, index in enumerate(meta.global_indexes):
                [key] = [key for key, (own, _) in self.rows.items() if own == index]
                self.rows[key] = (index, {name: column.rows[position] for name, column in batch.items()})

    async def read(self, meta: BatchMeta, columns: Sequence[str]) -> dict[str, list[Any]]:
        with self._call():
            whole = {index: row for index, row in self.rows.values() if row is not None}
            return {name: [whole[index][name] for index in meta.global_indexes] for name in columns}

    async def erase(self, meta: BatchMeta) -> None:
        with self._call():
            self.rows = {key: held for key, held in self.rows.items() if held[0] not in meta.global_indexes}

    def _meta(self, partition: str, keys: Sequence[str]) -> BatchMeta:
        held = [self.rows[key] for key in keys]
        common = set.intersection(*(set(row or ()) for _, row in held)) if held else set()
        schema = {name: {"dtype": next(row for _, row in held if row)[name].dtype} for name in common}
        return BatchMeta([index for index, _ in held], [partition] * len(held), schema)

    def _call(self) -> Any:
        return _Call(self.faults.pop(0) if self.faults else "none")


class _Call:
    def __init__(self, fault: str) -> None:
        self._fault = fault

    def __enter__(self) -> None:
        if self._fault == "before":
            raise NoAnswer

    def __exit__(self, *_: object) -> None:
        if self._fault == "after":
            raise NoAnswer


SOME_KEYS = st.lists(st.sampled_from("abc"), min_size=1, unique=True)
FAULTS = st.lists(st.sampled_from(["none", "none", "before", "after"]), max_size=6)


class Debtor(RuleBasedStateMachine):
    """Rows are put and cleared while calls fail. `there` is what must be readable; all else is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.store = FaultyStore()
        self.rows = RowStore(self.store, Metrics())
        self.there: dict[str, int] = {}
        self.puts = 0

    @rule(keys=SOME_KEYS, faults=FAULTS)
    def put(self, keys: list[str], faults: list[str]) -> None:
        self.puts += 1
        self.store.faults = list(faults)
        try:
            anyio.run(self.rows.put, "p", {key: {"x": np.array([self.puts])} for key in keys})
        except RowExists:
            assert set(keys) & set(self.there)
        except DataPlaneError:
            assert faults
        else:
            assert not set(keys) & set(self.there)
            self.there |= dict.fromkeys(keys, self.puts)

    @rule(keys=SOME_KEYS, faults=FAULTS)
    def clear(self, keys: list[str], faults: list[str]) -> None:
        self.store.faults = list(faults)
        try:
            anyio.run(self.rows.clear, "p", keys)
        except DataPlaneTimeout:
            assert self.rows.debts.among("p", keys) == keys
        self.there = {key: value for key, value in self.there.items() if key not in keys}

    @rule()
    def pay(self) -> None:
        self.store.faults = []
        anyio.run(self.rows.clear, "p", self.rows.debts.of("p"))
        assert not self.rows.debts.count
        assert set(self.store.rows) == set(self.there)

    @invariant()
    def what_is_there_can_be_read_and_nothing_else(self) -> None:
        self.store.faults = []
        anyio.run(self.read_all)
        assert set(self.store.rows) <= set(self.there) | set(self.rows.debts.of("p"))

    async def read_all(self) -> None:
        for key in "abc":
            if key in self.there:
                [found] = await self.rows.get("p", [key], ["x"])
                assert found["x"].tolist() == [self.there[key]]
            else:
                with pytest.raises(RowGone):
                    await self.rows.get("p", [key], ["x"])


def test_no_fault_leaves_a_key_neither_readable_nor_free_nor_owed() -> None:
    run_state_machine_as_test(Debtor, settings=settings(max_examples=60, stateful_step_count=12, deadline=None))
