"""Our digests equal NeMo-Gym's, byte for byte, and cover every field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ledger.digests import call_digest, call_extras, chain_hash, cumulative_hash, extras_digest
from ledger.records import WeightSpan

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "staging_digests_v2.json").read_text())


def ids(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("golden", GOLDEN["chain_hash"])
def test_chain_hash_is_golden(golden):
    assert chain_hash(golden["parent"], ids(golden["delta"])) == golden["hash"]


@pytest.mark.parametrize("golden", GOLDEN["cumulative_hash"])
def test_cumulative_hash_is_golden(golden):
    assert cumulative_hash(ids(golden["ids"])) == golden["hash"]


@pytest.mark.parametrize("golden", GOLDEN["extras_digest"])
def test_extras_digest_is_golden(golden):
    assert extras_digest(golden["extras"]) == golden["digest"]


def golden_call(record: dict[str, Any], mask_dtype: type) -> dict[str, Any]:
    return {
        "rollout_id": record["rollout_id"],
        "call_id": record["model_call_id"],
        "parent_call_id": record["parent_call_id"],
        "prev_len": record["prev_len"],
        "weight_version": record["weight_version"],
        "token_ids": ids(record["token_ids_delta"]),
        "token_mask": np.array(record["token_mask_delta"], dtype=mask_dtype),
        "logprobs": np.array(record["generation_log_probs_delta"], dtype=np.float32),
        "extras_digest": record["extras_digest"],
        "chain_hash": record["chain_hash"],
        "cumulative_hash": record["cumulative_hash"],
    }


@pytest.mark.parametrize("mask_dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("record", GOLDEN["call_digest"])
def test_call_digest_is_golden(record, mask_dtype):
    assert extras_digest(record["extras"]) == record["extras_digest"]
    assert chain_hash(record["parent_chain_hash"], ids(record["token_ids_delta"])) == record["chain_hash"]
    assert call_digest(**golden_call(record, mask_dtype)) == record["digest"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rollout_id", "other"),
        ("call_id", "other"),
        ("parent_call_id", "other"),
        ("parent_call_id", None),
        ("prev_len", 19),
        ("weight_version", 13),
        ("extras_digest", "0" * 64),
        ("chain_hash", "0" * 64),
        ("cumulative_hash", "0" * 64),
    ],
)
def test_call_digest_covers_each_scalar(field, value):
    record = GOLDEN["call_digest"][1]
    assert call_digest(**golden_call(record, np.uint8) | {field: value}) != record["digest"]


@pytest.mark.parametrize("field", ["token_ids", "token_mask", "logprobs"])
def test_call_digest_covers_each_element_of_each_array(field):
    record = GOLDEN["call_digest"][1]
    for i in range(record["delta_len"]):
        call = golden_call(record, np.uint8)
        call[field][i] = call[field][i] + 1 if field != "token_mask" else 1 - call[field][i]
        assert call_digest(**call) != record["digest"]


def test_byte_order_width_and_strides_of_the_array_do_not_matter():
    values = ids([3, 70_000, 9, 1])
    spread = np.repeat(values, 2)[::2]
    assert not spread.flags.c_contiguous
    for same in (values.astype(np.int32), values.astype(">i8"), values.astype(np.uint64), spread):
        assert cumulative_hash(same) == cumulative_hash(values)
        assert chain_hash(None, same) == chain_hash(None, values)


def test_the_chain_hash_depends_on_the_division_into_calls_and_the_cumulative_hash_does_not():
    whole, head, tail = ids([1, 2, 3, 4]), ids([1, 2]), ids([3, 4])
    assert chain_hash(chain_hash(None, head), tail) != chain_hash(None, whole)
    assert cumulative_hash(np.concatenate([head, tail])) == cumulative_hash(whole)


def test_call_extras_name_spans_and_finish_reason():
    extras = call_extras([WeightSpan(version=3, start=0, end=2), WeightSpan(version=4, start=2, end=5)], "stop")
    assert extras == {"weight_spans": [[3, 0, 2], [4, 2, 5]], "finish_reason": "stop"}
    assert extras_digest(extras) != extras_digest(extras | {"finish_reason": "length"})


@pytest.mark.parametrize(
    "value", [(1, 2), b"x", np.float64(1.0), float("nan"), float("inf"), 1 << 63, {1: 2}, {"a": {1, 2}}]
)
def test_extras_with_inexact_types_are_refused(value):
    with pytest.raises((TypeError, ValueError), match="extras"):
        extras_digest({"value": value})


def test_extras_digest_ignores_key_order_but_not_types():
    assert extras_digest({"a": 1, "b": 2}) == extras_digest({"b": 2, "a": 1})
    assert len({extras_digest({"a": value}) for value in (1, 1.0, True, "1", None, [1])}) == 6


def test_bad_arrays_and_parents_are_refused():
    with pytest.raises(ValueError, match="negative"):
        cumulative_hash(ids([1, -1]))
    with pytest.raises(TypeError, match="integer"):
        cumulative_hash(np.array([1.0]))
    with pytest.raises(TypeError, match="1-D"):
        cumulative_hash(np.zeros((2, 2), dtype=np.int64))
    for parent in ("00", "A" * 64, "x" * 64):
        with pytest.raises(ValueError, match="hex"):
            chain_hash(parent, ids([1]))
    record = golden_call(GOLDEN["call_digest"][0], np.uint8)
    with pytest.raises(ValueError, match="same shape"):
        call_digest(**record | {"logprobs": record["logprobs"][:-1]})
