"""Verification gives back exactly the captured tokens, and nothing once any bit of them or of the chain is changed."""

from __future__ import annotations

import anyio
import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from ledger import ids
from ledger.links import Link
from ledger.reasons import Reason, Rejection
from ledger.receipts import Receipt, rebuild
from ledger.records import Routes, WeightSpan
from ledger.verify import RowPlan, VerifiedRow, materialize, plan_row, verify
from tests.ledger.rig import Rig, started
from tests.ledger.worker import Row, altered, answer, user

pytestmark = pytest.mark.anyio

COLUMNS = ("token_ids", "token_mask", "logprobs", "weight_versions", "routed_experts")


async def honest() -> tuple[Receipt, Rig]:
    """Four turns, with weights that change between and within them."""
    rig = await started()
    rig.worker.routes = (2, 3)
    conversation = ()
    for rig.worker.version, text in enumerate("abcd", start=5):
        conversation = (*conversation, user(text))
        conversation = (*conversation, (await rig.chat(*conversation)).message)
    return await rig.sealed(), rig


RECEIPT, RIG = anyio.run(honest)
ROWS = RIG.worker.rows
LINKS = st.integers(0, len(RECEIPT.chain) - 1)


def with_link(i: int, link: Link) -> Receipt:
    return replace(RECEIPT, chain=(*RECEIPT.chain[:i], link, *RECEIPT.chain[i + 1 :]))


def rejected(receipt: Receipt, rows: dict[str, Row]) -> bool:
    return isinstance(verify(receipt, rows), Rejection)


def test_a_verified_row_is_the_concatenation_of_what_was_captured():
    row = verify(RECEIPT, ROWS)
    assert isinstance(row, VerifiedRow)
    columns = (row.input_ids, row.loss_mask, row.rollout_logprobs, row.weight_versions, row.routed_experts)
    for name, column in zip(COLUMNS, columns, strict=True):
        expected = np.concatenate([getattr(ROWS[link.staging_key], name) for link in RECEIPT.chain])
        np.testing.assert_array_equal(column, expected)
        assert column.dtype == expected.dtype
    assert row.input_ids.tolist() == RIG.worker.tokens["g0.0/3"]
    assert row.length == len(RIG.worker.tokens["g0.0/3"])
    assert row.loss_tokens == row.loss_mask.sum() == sum(link.generated for link in RECEIPT.chain)
    assert row.oldest_version == row.weight_versions[row.loss_mask == 1].min() == 5


@given(LINKS, st.sampled_from(COLUMNS), st.data())
def test_any_flipped_bit_of_a_staged_row_is_noticed(i, column, data):
    key = RECEIPT.chain[i].staging_key
    values = getattr(ROWS[key], column).copy()
    raw = values.view(np.uint8)
    at = data.draw(st.integers(0, raw.size - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    assert rejected(RECEIPT, ROWS | {key: altered(ROWS[key], **{column: values})})


@given(LINKS, st.sampled_from(COLUMNS), st.data())
def test_a_longer_or_shorter_column_is_noticed(i, column, data):
    key = RECEIPT.chain[i].staging_key
    values = getattr(ROWS[key], column)
    at = data.draw(st.integers(0, len(values) - 1))
    for changed in (np.delete(values, at), np.insert(values, at, values[at]), values[:0], values[None, :]):
        assert rejected(RECEIPT, ROWS | {key: altered(ROWS[key], **{column: changed})})


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("dtype", [np.int32, np.float64, np.bool_, np.complex64, np.uint64])
def test_a_column_of_another_type_is_noticed(column, dtype):
    key = RECEIPT.chain[0].staging_key
    result = verify(RECEIPT, ROWS | {key: altered(ROWS[key], **{column: getattr(ROWS[key], column).astype(dtype)})})
    assert isinstance(result, Rejection)
    assert result.reason is (Reason.WRONG_ROUTES if column == "routed_experts" else Reason.MALFORMED_ROW)


HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
OTHER = {
    "call_id": st.sampled_from(["g0.0/0", "g0.0/1", "g0.0/2", "g0.0/3", "g0.0/9", "g0.1/0", "", "/", "g0.0"]),
    "staging_key": st.sampled_from([*ROWS, "", "g0.0/0-00000000"]),
    "digest": HEX | st.text(max_size=4),
    "extras_digest": HEX | st.text(max_size=4),
    "chain_hash": HEX | st.text(max_size=4),
    "cumulative_hash": HEX | st.text(max_size=4),
    "prev_len": st.integers(-5, 200),
    "carry_len": st.integers(-5, 200),
    "delta_len": st.integers(-5, 200),
    "weight_spans": st.lists(st.builds(WeightSpan, *[st.integers(-1, 9)] * 3), max_size=3).map(tuple),
    "finish_reason": st.sampled_from(["stop", "length", "abort"]),
    "routes": st.none()
    | st.builds(Routes, layers=st.integers(-1, 3), topk=st.integers(-1, 3), digest=HEX | st.text(max_size=4)),
}


@pytest.mark.parametrize("field", [f.name for f in msgspec.structs.fields(Link)])
@given(i=LINKS, data=st.data())
def test_any_changed_field_of_a_link_is_noticed(field, i, data):
    link = RECEIPT.chain[i]
    other = data.draw(OTHER[field].filter(lambda value: value != getattr(link, field)))
    assert rejected(with_link(i, replace(link, **{field: other})), ROWS)


@given(LINKS, HEX)
def test_a_digest_with_a_staging_key_to_match_is_noticed(i, digest):
    link = RECEIPT.chain[i]
    changed = replace(link, digest=digest, staging_key=ids.staging_key(link.call_id, digest))
    assert rejected(with_link(i, changed), ROWS | {changed.staging_key: ROWS[link.staging_key]})


@given(st.permutations(range(len(RECEIPT.chain))), st.integers(0, len(RECEIPT.chain)))
def test_a_chain_with_links_dropped_or_reordered_is_noticed(order, length):
    chain = tuple(RECEIPT.chain[i] for i in order[:length])
    assume(chain != RECEIPT.chain[:length])
    assert rejected(replace(RECEIPT, chain=chain), ROWS)
    assert rejected(replace(RECEIPT, chain=chain, terminal=chain[-1].call_id), ROWS)


def test_a_receipt_cut_short_differs_from_what_the_events_testify():
    events = RIG.events()
    assert rebuild(events) == RECEIPT
    cut = replace(RECEIPT, chain=RECEIPT.chain[:2], terminal=RECEIPT.chain[1].call_id)
    assert not rejected(cut, ROWS)  # It is a true conversation, only not the rollout's.
    assert rebuild(events) != cut


@given(st.permutations(sorted(ROWS)))
def test_rows_under_each_others_keys_are_noticed(keys):
    swapped = {key: ROWS[other] for key, other in zip(sorted(ROWS), keys, strict=True)}
    assert rejected(RECEIPT, swapped) == (keys != sorted(ROWS))


@given(LINKS)
def test_a_missing_row_is_named(i):
    key = RECEIPT.chain[i].staging_key
    result = verify(RECEIPT, {k: v for k, v in ROWS.items() if k != key})
    assert result == Rejection(Reason.MISSING_ROW, f"no staged row {key!r}")


async def test_another_rollouts_rows_and_links_are_foreign_even_if_all_else_is_right():
    rig = Rig()
    await rig.start("x", "y")
    for rollout_id in ("x", "y"):
        await rig.turns("a", "b", rollout_id=rollout_id)
    mine, other = await rig.sealed("x"), await rig.sealed("y")
    result = verify(replace(mine, chain=other.chain, terminal=other.terminal), rig.worker.rows)
    assert isinstance(result, Rejection)
    assert result.reason is Reason.FOREIGN_CALL
    renamed = verify(replace(other, rollout_id="x"), rig.worker.rows)
    assert isinstance(renamed, Rejection)


async def test_a_row_staged_anew_with_digests_of_its_own_does_not_pass_for_the_committed_one():
    rig = await started()
    requests = []
    generate = rig.worker.generate

    async def spy(request):
        requests.append(request)
        return await generate(request)

    rig.worker.generate = spy
    (reply,) = await rig.turns("a")
    receipt = await rig.sealed()
    row = rig.worker.rows[reply.coords.staging_key]
    forged = altered(row, token_ids=row.token_ids + row.token_mask)
    again = answer(
        requests[0],
        forged,
        carry_len=reply.coords.carry_len,
        spans=reply.coords.weight_spans,
        text="",
        tokens=forged.token_ids.tolist(),
    )
    assert again.coords.staging_key != reply.coords.staging_key
    assert rejected(receipt, {reply.coords.staging_key: forged})
    assert rejected(receipt, {again.coords.staging_key: forged})


async def test_only_rows_of_the_chain_are_needed():
    rig = await started()
    (first,) = await rig.turns("a")
    await rig.turns("b")
    await rig.ledger.declare_terminal("g0.0", first.coords.call_id)
    receipt = await rig.sealed()
    rows = {first.coords.staging_key: rig.worker.rows[first.coords.staging_key]}
    assert isinstance(verify(receipt, rows), VerifiedRow)


def test_receipt_and_plan_survive_msgpack_and_the_plan_says_where_each_row_goes():
    plan = plan_row(msgspec.msgpack.decode(msgspec.msgpack.encode(RECEIPT), type=Receipt))
    assert isinstance(plan, RowPlan)
    plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=RowPlan)
    row = materialize(plan, ROWS)
    assert isinstance(row, VerifiedRow)
    assert plan.length == row.length
    for link in plan.links:
        np.testing.assert_array_equal(row.input_ids[link.prev_len : link.end], ROWS[link.staging_key].token_ids)


def test_a_rejected_receipt_is_never_verified_even_with_a_chain_and_all_rows():
    rejection = Rejection(Reason.ABORTED, "why")
    assert verify(replace(RECEIPT, rejections=(rejection,)), ROWS) == rejection


def test_a_receipt_without_a_terminal_is_broken():
    assert rejected(replace(RECEIPT, terminal=None), ROWS)
    assert rejected(replace(RECEIPT, terminal="g0.0/0"), ROWS)
    assert rejected(replace(RECEIPT, chain=(), terminal=None), ROWS)
