"""Coordinates that are impossible are refused even when every digest in them was made to match."""

from __future__ import annotations

import anyio
import numpy as np
import pytest
from msgspec.structs import replace

from ledger import ids
from ledger.digests import call_extras, extras_digest
from ledger.errors import CallFailedError
from ledger.links import Link, check_link
from ledger.reasons import CallFailure, Reason
from ledger.records import CallRequest, WeightSpan
from ledger.verify import Rejection, verify
from tests.ledger.rig import started
from tests.ledger.worker import altered, answer, user

pytestmark = pytest.mark.anyio


async def _link() -> Link:
    rig = await started()
    rig.worker.generated = 4
    await rig.turns("a")
    return (await rig.sealed()).chain[0]


LINK = anyio.run(_link)


def reason(link: Link) -> Reason | None:
    rejection = check_link(link, rollout_id="g0.0", prev_len=0)
    return None if rejection is None else rejection.reason


def spans(*bounds: tuple[int, int, int]) -> Link:
    weight_spans = tuple(WeightSpan(*b) for b in bounds)
    try:
        digest = extras_digest(call_extras(weight_spans, LINK.finish_reason))
    except ValueError:
        digest = LINK.extras_digest
    return replace(LINK, weight_spans=weight_spans, extras_digest=digest)


def test_spans_that_cover_the_generated_tokens_in_order_are_right():
    assert reason(LINK) is None
    assert reason(spans((7, 0, 4))) is None
    assert reason(spans((7, 0, 1), (8, 1, 3), (7, 3, 4))) is None


@pytest.mark.parametrize(
    "bounds",
    [
        [],
        [(0, 0, 3)],
        [(0, 0, 5)],
        [(0, 1, 4)],
        [(0, 0, 2), (1, 3, 4)],
        [(0, 0, 3), (1, 2, 4)],
        [(1, 2, 4), (0, 0, 2)],
        [(0, 0, 0), (0, 0, 4)],
        [(0, 0, 5), (1, 5, 4)],
        [(0, 0, 4), (1, 4, 4)],
        [(-1, 0, 4)],
        [(1 << 63, 0, 4)],
    ],
)
def test_spans_that_do_not_are_wrong(bounds):
    assert reason(spans(*bounds)) is Reason.WRONG_VERSIONS


@pytest.mark.parametrize(("carry_len", "delta_len"), [(-1, 3), (5, 1), (-4, 0), (0, 0), (0, -4)])
def test_impossible_lengths_are_wrong(carry_len, delta_len):
    changed = replace(LINK, carry_len=carry_len, delta_len=delta_len)
    assert reason(changed) is Reason.WRONG_LENGTH


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "G" * 64, "A" * 64, "0" * 64 + "\n"])
def test_digests_must_be_sha256_in_lowercase_hex(digest):
    changed = replace(LINK, digest=digest, staging_key=ids.staging_key(LINK.call_id, digest))
    assert reason(changed) is Reason.WRONG_DIGEST
    assert reason(replace(LINK, chain_hash=digest)) is Reason.WRONG_CHAIN_HASH
    assert reason(replace(LINK, cumulative_hash=digest)) is Reason.WRONG_CUMULATIVE_HASH


def lying(rig, change):
    """A worker that stages a changed row with digests that match it."""
    generate = rig.worker.generate

    async def lie(request: CallRequest):
        reply = await generate(request)
        row = rig.worker.rows.pop(reply.coords.staging_key)
        carry = reply.coords.carry_len
        row = altered(row, **change(row, carry))
        reply = answer(
            request,
            row,
            carry_len=carry,
            spans=reply.coords.weight_spans,
            text=reply.message.content or "",
            tokens=row.token_ids.tolist(),
        )
        rig.worker.rows[reply.coords.staging_key] = row
        return reply

    rig.worker.generate = lie


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda row, carry: {"token_mask": np.ones_like(row.token_mask)}, Reason.WRONG_MASK),
        (lambda row, carry: {"token_mask": np.zeros_like(row.token_mask)}, Reason.WRONG_MASK),
        (lambda row, carry: {"token_mask": row.token_mask * np.uint8(2)}, Reason.WRONG_MASK),
        (lambda row, carry: {"logprobs": row.logprobs + row.token_mask * np.float32(1)}, Reason.BAD_LOGPROBS),
        (lambda row, carry: {"logprobs": row.logprobs - np.float32(1)}, Reason.BAD_LOGPROBS),
        (lambda row, carry: {"weight_versions": row.weight_versions + row.token_mask}, Reason.WRONG_VERSIONS),
    ],
    ids=["mask of ones", "mask of zeros", "mask of twos", "positive", "on the prompt", "versions"],
)
async def test_a_row_of_the_wrong_shape_is_rejected_even_if_its_digests_match(change, expected):
    rig = await started()
    lying(rig, change)
    await rig.turns("a")
    result = verify(await rig.sealed(), rig.worker.rows)
    assert isinstance(result, Rejection)
    assert result.reason is expected


async def test_an_honest_answer_to_another_call_fails_the_call():
    rig = await started()
    generate = rig.worker.generate

    async def mix_up(request: CallRequest):
        return await generate(replace(request, call_id="g0.0/7"))

    rig.worker.generate = mix_up
    with pytest.raises(CallFailedError, match="the coordinates are those of call") as caught:
        await rig.chat(user("a"))
    assert caught.value.reason is CallFailure.INVALID_COORDS
