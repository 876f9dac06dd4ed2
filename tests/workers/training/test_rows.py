"""Rows are checked against what was announced before any tensor is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dataplane.memory import MemoryPlane
from dataplane.schema import TRAIN
from tests.workers.training.make import CPU, VOCAB, batch_of, random_rows
from workers.training.errors import BadTrainRow
from workers.training.rows import collate, fetch_rows, split

Row = dict[str, Any]


def row() -> Row:
    return {
        "input_ids": np.array([5, 6, 7, 8]),
        "loss_mask": np.array([0, 1, 0, 1], np.uint8),
        "rollout_logprobs": np.array([0, -1.5, 0, -2.5], np.float32),
        "weight_versions": np.zeros(4, np.int64),
    }


def collated(*rows: Row, lengths: list[int] | None = None):
    keys = [f"k{i}" for i in range(len(rows))]
    return collate(keys, rows, vocab_size=VOCAB, device=CPU, lengths=lengths)


def test_loss_tokens_are_found_in_row_order():
    short = {name: column[:2] for name, column in row().items()}
    batch = collated(row(), short, lengths=[4, 2])
    assert batch.input_ids.tolist() == [[5, 6, 7, 8], [5, 6, 0, 0]]
    assert (batch.row.tolist(), batch.position.tolist()) == ([0, 0, 1], [1, 3, 1])
    assert batch.row_tokens.tolist() == [2, 1]
    assert batch.rollout_logprobs.tolist() == [-1.5, -2.5, -1.5]
    assert batch.tokens == 3


def put(name: str, value: Any) -> Callable[[Row], None]:
    return lambda r: r.update({name: value})


def put_at(name: str, index: int, value: Any) -> Callable[[Row], None]:
    def change(r: Row) -> None:
        r[name][index] = value

    return change


BAD: list[tuple[Callable[[Row], None], str]] = [
    (put("input_ids", np.array([1, 2, 3, 4], np.int32)), r"input_ids is int32 with 1 dimension\(s\), not 1-D int64"),
    (put("loss_mask", np.zeros(4, np.int64)), "loss_mask is int64"),
    (put("rollout_logprobs", np.zeros(4, np.int64)), "rollout_logprobs is int64"),
    (put("input_ids", np.zeros((2, 2), np.int64)), r"input_ids is int64 with 2 dimension"),
    (put("loss_mask", np.zeros(3, np.uint8)), r"columns differ in length: .*'loss_mask': 3"),
    (put_at("input_ids", 2, VOCAB), f"token ids go from 5 to {VOCAB}; the model has 0 to {VOCAB - 1}"),
    (put_at("input_ids", 2, -1), "token ids go from -1 to 8"),
    (put_at("loss_mask", 2, 2), "loss_mask holds 2"),
    (put_at("loss_mask", 0, 1), "marks the first token"),
    (put_at("rollout_logprobs", 3, -np.inf), "not finite"),
    (put_at("rollout_logprobs", 1, np.nan), "not finite"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_row_is_named_with_what_is_wrong(number: int):
    change, message = BAD[number]
    bad = row()
    change(bad)
    with pytest.raises(BadTrainRow, match=rf"row 'k1': .*{message}"):
        collated(row(), bad, lengths=[4, 4])


def test_a_length_that_was_not_announced_is_refused():
    with pytest.raises(BadTrainRow, match="row 'k0': it has 4 tokens, 5 were announced"):
        collated(row(), lengths=[5])


def test_no_rows_are_refused():
    with pytest.raises(BadTrainRow, match="no rows"):
        collated()


def test_logprobs_of_tokens_outside_the_loss_do_not_matter():
    masked = row()
    masked["rollout_logprobs"][2] = np.nan
    assert collated(masked).rollout_logprobs.tolist() == [-1.5, -2.5]


def test_split_keeps_every_row_within_the_bound():
    rows = list(random_rows(30, longest=20).values())
    parts = list(split(rows, 64))
    assert sorted(i for part in parts for i in part) == list(range(30))
    assert all(len(part) * max(len(rows[i]["input_ids"]) for i in part) <= 64 for part in parts)
    assert [len(part) for part in split(rows[:3], 1)] == [1, 1, 1]


@pytest.mark.anyio
async def test_rows_come_from_the_plane_in_the_order_of_the_keys():
    plane, rows = MemoryPlane(), random_rows(5)
    await plane.put(TRAIN, rows)
    keys = ["row-3", "row-0", "row-4"]
    fetched = await fetch_rows(plane, TRAIN, keys)
    got = collate(keys, fetched, vocab_size=VOCAB, device=CPU)
    assert got.input_ids.equal(batch_of(rows, keys).input_ids)
