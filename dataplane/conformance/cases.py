"""What every DataPlane must do while its servers are well: run each of CASES with a plane and a partition that is empty.

The cases use the plane from one event loop and nothing but the protocol. They leave rows behind, and the last one closes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import numpy as np
import pytest

from dataplane.errors import BadRow, DataPlaneDown, RowExists, RowGone, RowMismatch
from dataplane.plane import COLUMN_DTYPES, DataPlane

Case = Callable[[DataPlane, str], Awaitable[None]]

CASES: list[Case] = []


def case(function: Case) -> Case:
    CASES.append(function)
    return function


def row(value: int, length: int = 3) -> dict[str, Any]:
    return {"ids": np.full(length, value, np.int64), "logprobs": np.full(length, value / 2, np.float32)}


async def values(plane: DataPlane, partition: str, keys: list[str]) -> list[int]:
    return [int(r["ids"][0]) for r in await plane.get(partition, keys, ["ids"])]


@case
async def rows_come_back_as_they_were_put(plane: DataPlane, partition: str) -> None:
    dtypes = sorted(COLUMN_DTYPES, key=str)
    rows = {f"r{n}": {dt.name: np.arange(-n, n * n + 1).astype(dt) for dt in dtypes} for n in range(7)}
    await plane.put(partition, rows)
    keys = ["r5", "r0", "r3", "r6"]
    for key, got in zip(keys, await plane.get(partition, keys, [dt.name for dt in dtypes]), strict=True):
        for dt in dtypes:
            assert got[dt.name].dtype == dt
            np.testing.assert_array_equal(got[dt.name], rows[key][dt.name])


@case
async def a_float_keeps_its_bits(plane: DataPlane, partition: str) -> None:
    odd = np.array([0.1, -0.0, np.inf, -np.inf, np.nan, 1e-45], np.float32)
    await plane.put(partition, {"a": {"x": odd}})
    [got] = await plane.get(partition, ["a"], ["x"])
    assert got["x"].tobytes() == odd.tobytes()


@case
async def any_memory_layout_can_be_put(plane: DataPlane, partition: str) -> None:
    grid = np.arange(12, dtype=np.int64).reshape(3, 4)
    frozen = np.frombuffer(b"\x01\x02\x03", np.uint8)
    await plane.put(partition, {"a": {"column": grid[:, 1], "reversed": grid[0, ::-1], "frozen": frozen}})
    [got] = await plane.get(partition, ["a"], ["column", "reversed", "frozen"])
    assert got["column"].tolist() == [1, 5, 9]
    assert got["reversed"].tolist() == [3, 2, 1, 0]
    assert got["frozen"].tolist() == [1, 2, 3]


@case
async def a_get_returns_the_asked_columns_only(plane: DataPlane, partition: str) -> None:
    await plane.put(partition, {"a": row(1)})
    [got] = await plane.get(partition, ["a"], ["logprobs"])
    assert list(got) == ["logprobs"]
    assert await plane.get(partition, ["a"], []) == [{}]


@case
async def rows_are_copies_on_the_way_in_and_out(plane: DataPlane, partition: str) -> None:
    mine = row(1)
    await plane.put(partition, {"a": mine})
    mine["ids"][:] = 9
    first, second = await plane.get(partition, ["a", "a"], ["ids"])
    first["ids"][:] = 8
    assert second["ids"].tolist() == [1, 1, 1]
    assert await values(plane, partition, ["a"]) == [1]


@case
async def nothing_is_asked_and_nothing_happens(plane: DataPlane, partition: str) -> None:
    await plane.put(partition, {})
    assert await plane.get(partition, [], ["ids"]) == []
    assert await plane.clear(partition, []) == 0
    assert await plane.keys(partition) == []


@case
async def a_key_is_written_once(plane: DataPlane, partition: str) -> None:
    await plane.put(partition, {"a": row(1), "b": row(2)})
    with pytest.raises(RowExists) as raised:
        await plane.put(partition, {"c": row(3), "b": row(4)})
    assert raised.value.keys == ("b",)
    assert await plane.keys(partition) == ["a", "b"]
    assert await values(plane, partition, ["b"]) == [2]


@case
async def the_missing_keys_of_a_get_are_named(plane: DataPlane, partition: str) -> None:
    with pytest.raises(RowGone):
        await plane.get(partition, ["a"], ["ids"])
    await plane.put(partition, {"a": row(1)})
    with pytest.raises(RowGone) as raised:
        await plane.get(partition, ["x", "a", "y", "x"], ["ids"])
    assert raised.value.keys == ("x", "y")


@case
async def rows_without_an_asked_column_are_named(plane: DataPlane, partition: str) -> None:
    await plane.put(partition, {"a": row(1)})
    await plane.put(partition, {"b": {"ids": np.ones(1, np.int64)}})
    assert await values(plane, partition, ["a", "b"]) == [1, 1]
    with pytest.raises(RowMismatch) as raised:
        await plane.get(partition, ["a", "b"], ["ids", "logprobs"])
    assert raised.value.keys == ("b",)
    with pytest.raises(RowMismatch):
        await plane.get(partition, ["a"], ["nonesuch"])


@case
async def partitions_do_not_share_keys(plane: DataPlane, partition: str) -> None:
    other = f"{partition}, another"
    await plane.put(partition, {"a": row(1)})
    await plane.put(other, {"a": row(2)})
    assert await plane.clear(partition, ["a"]) == 1
    assert await values(plane, other, ["a"]) == [2]


@case
async def clearing_counts_rows_and_ignores_the_rest(plane: DataPlane, partition: str) -> None:
    await plane.put(partition, {"a": row(1), "b": row(2), "c": row(3)})
    assert await plane.clear(partition, ["a", "c", "a", "nonesuch"]) == 2
    assert await plane.clear(partition, ["a", "c"]) == 0
    assert await plane.keys(partition) == ["b"]
    assert await plane.clear("never seen " + partition, ["a"]) == 0


@case
async def a_cleared_key_is_free_again(plane: DataPlane, partition: str) -> None:
    for value in range(3):
        await plane.put(partition, {"a": row(value, length=value + 1)})
        assert await values(plane, partition, ["a"]) == [value]
        assert await plane.clear(partition, ["a"]) == 1
        with pytest.raises(RowGone):
            await plane.get(partition, ["a"], ["ids"])


@case
async def bad_rows_are_refused_whole(plane: DataPlane, partition: str) -> None:
    good = row(1)
    for bad in [
        {},
        {"ids": np.zeros(0, np.int64)},
        {"ids": np.zeros((2, 2), np.int64)},
        {"ids": np.zeros((), np.int64)},
        {"ids": np.zeros(2, np.float64)},
        {"ids": np.zeros(2, ">i8")},
        {"ids": [1, 2]},
        {"": np.zeros(2, np.int64)},
        {"__mine": np.zeros(2, np.int64)},
        {"ids": np.zeros(2, np.int64)},  # fewer columns than its neighbour
        {**good, "ids": np.zeros(2, np.int32)},  # another dtype than its neighbour
    ]:
        with pytest.raises(BadRow) as raised:
            await plane.put(partition, {"good": good, "bad": bad})
        assert raised.value.keys == ("bad",)
    for key in ("", "\ud800"):
        with pytest.raises(BadRow):
            await plane.put(partition, {"good": good, key: good})
    with pytest.raises(BadRow):
        await plane.put("", {"good": good})
    assert await plane.keys(partition) == []


@case
async def a_column_has_one_dtype_among_the_living_rows(plane: DataPlane, partition: str) -> None:
    await plane.put(partition, {"a": {"x": np.zeros(2, np.int32), "y": np.zeros(2, np.uint8)}})
    with pytest.raises(BadRow, match="'x' is int64"):
        await plane.put(partition, {"b": {"z": np.zeros(1, np.uint8), "x": np.zeros(1, np.int64)}})
    assert await plane.keys(partition) == ["a"]
    await plane.clear(partition, ["a"])
    await plane.put(partition, {"b": {"x": np.zeros(1, np.int64)}})
    [got] = await plane.get(partition, ["b"], ["x"])
    assert got["x"].dtype == np.int64


@case
async def keys_are_listed_by_prefix_in_order(plane: DataPlane, partition: str) -> None:
    await plane.put(partition, {key: row(1) for key in ("b/1", "a/2", "a/10", "ä")})
    assert await plane.keys(partition) == ["a/10", "a/2", "b/1", "ä"]
    assert await plane.keys(partition, prefix="a/") == ["a/10", "a/2"]


@case
async def any_text_is_a_key(plane: DataPlane, partition: str) -> None:
    keys = ["a b", "\0", "ключ", "k" * 5000, "a/b@c:d"]
    await plane.put(partition, {key: row(i) for i, key in enumerate(keys)})
    assert await values(plane, partition, keys) == [0, 1, 2, 3, 4]
    assert await plane.clear(partition, keys) == 5


@case
async def calls_on_a_partition_take_effect_in_their_order(plane: DataPlane, partition: str) -> None:
    seen: list[object] = []

    async def note(call: Awaitable[object]) -> None:
        seen.append(await call)

    async with anyio.create_task_group() as tasks:
        for value in range(20):
            tasks.start_soon(note, plane.put(partition, {"a": row(value), f"b{value}": row(value)}))
            tasks.start_soon(note, values(plane, partition, ["a", f"b{value}"]))
            tasks.start_soon(note, plane.clear(partition, ["a"]))
            tasks.start_soon(note, plane.keys(partition, prefix="a"))
    assert sorted(map(repr, seen)) == sorted(
        repr(result) for value in range(20) for result in (None, [value, value], 1, [])
    )


@case
async def a_cancelled_scope_starts_nothing(plane: DataPlane, partition: str) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await plane.put(partition, {"a": row(1)})
    assert scope.cancelled_caught
    assert await plane.keys(partition) == []


@case
async def a_closed_plane_says_so(plane: DataPlane, partition: str) -> None:
    await plane.aclose()
    await plane.aclose()
    for call in (
        plane.put(partition, {"a": row(1)}),
        plane.get(partition, ["a"], ["ids"]),
        plane.clear(partition, ["a"]),
        plane.keys(partition),
    ):
        with pytest.raises(DataPlaneDown):
            await call
