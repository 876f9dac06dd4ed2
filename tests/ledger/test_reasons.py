"""Every reason code has one way to come about here, and the code that comes is exactly that one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from msgspec.structs import replace

from ledger.digests import call_extras, extras_digest
from ledger.events import GroupDropped
from ledger.lineage import fingerprint
from ledger.reasons import CallFailure, Reason, Rejection
from ledger.receipts import Receipt
from ledger.records import WeightSpan
from ledger.verify import verify
from tests.ledger.rig import Rig, started
from tests.ledger.worker import altered, user

pytestmark = pytest.mark.anyio

Scenario = Callable[[Rig], Awaitable[Reason | str | None]]
SCENARIOS: dict[Reason, Scenario] = {}


def gives(reason: Reason) -> Callable[[Scenario], Scenario]:
    def register(scenario: Scenario) -> Scenario:
        assert reason not in SCENARIOS
        SCENARIOS[reason] = scenario
        return scenario

    return register


OF_THE_CONTROLLER = {Reason.ROWS_UNAVAILABLE, Reason.NO_TOKENS, Reason.BAD_TOKENS, Reason.NOT_PUBLISHED}
"""Not found by the ledger; see tests/custody/test_codes.py."""


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason not in OF_THE_CONTROLLER])
async def test_each_reason_comes_from_its_own_cause(reason):
    assert await SCENARIOS[reason](await started()) is reason


def test_codes_are_stable_words_with_a_meaning():
    for code in [*Reason, *CallFailure]:
        assert code == code.name.lower()
        assert code.meaning
        assert type(code)(str(code)) is code


def why(receipt: Receipt, rig: Rig) -> Reason | None:
    result = verify(receipt, rig.worker.rows)
    return result.reason if isinstance(result, Rejection) else None


@gives(Reason.NO_CALLS)
async def _(rig: Rig):
    return why(await rig.sealed(), rig)


@gives(Reason.NOT_SEALED)
async def _(rig: Rig):
    await rig.turns("a")
    return why(rig.ledger.receipt("g0.0"), rig)


@gives(Reason.ABORTED)
async def _(rig: Rig):
    await rig.turns("a")
    return why(await rig.ledger.abort("g0.0", "not wanted"), rig)


@gives(Reason.ROLLOUT_TIMEOUT)
async def _(rig: Rig):
    await rig.turns("a")
    return why(await rig.ledger.seal("g0.0", failure=Reason.ROLLOUT_TIMEOUT), rig)


@gives(Reason.TURN_TIMEOUT)
async def _(rig: Rig):
    await rig.turns("a")
    return why(await rig.ledger.seal("g0.0", failure=Reason.TURN_TIMEOUT), rig)


@gives(Reason.ENVIRONMENT_FAILED)
async def _(rig: Rig):
    await rig.turns("a")
    return why(await rig.ledger.seal("g0.0", failure=Reason.ENVIRONMENT_FAILED), rig)


@gives(Reason.UNSETTLED_CALL)
async def _(rig: Rig):
    await rig.turns("a")
    await rig.ledger.admit("g0.0", fingerprint([user("lost")]))
    return why(await rig.sealed(), rig)


@gives(Reason.CALL_FAILED)
async def _(rig: Rig):
    await rig.turns("a")
    admission = await rig.ledger.admit("g0.0", fingerprint([user("b")]))
    await rig.ledger.fail(admission.call_id, CallFailure.GENERATION_FAILED, "")
    return why(await rig.sealed(), rig)


@gives(Reason.UNKNOWN_TERMINAL)
async def _(rig: Rig):
    await rig.turns("a")
    await rig.ledger.declare_terminal("g0.0", "g0.0/1")
    return why(await rig.sealed(), rig)


@gives(Reason.AMBIGUOUS_TERMINAL)
async def _(rig: Rig):
    await rig.turns("a")
    await rig.turns("b")
    return why(await rig.sealed(), rig)


@gives(Reason.CONFLICTING_WITNESSES)
async def _(rig: Rig):
    first, second = await rig.turns("a", "b")
    await rig.ledger.witness("g0.0", response_id=first.coords.call_id, content=second.message.content)
    return why(await rig.sealed(), rig)


@gives(Reason.PROMPT_FAILED)
async def _(rig: Rig):
    await rig.sealed()
    await rig.ledger.finalize("g0.0", Reason.ENVIRONMENT_FAILED)
    await rig.ledger.dropped("g0", Reason.PROMPT_FAILED)
    (event,) = [e for e in rig.log.events if isinstance(e, GroupDropped)]
    return Reason(event.reason)


@gives(Reason.NO_VALID_ROLLOUT)
async def _(rig: Rig):
    await rig.sealed()
    await rig.ledger.finalize("g0.0", Reason.NO_CALLS)
    await rig.ledger.dropped("g0", Reason.NO_VALID_ROLLOUT)
    (event,) = [e for e in rig.log.events if isinstance(e, GroupDropped)]
    return Reason(event.reason)


async def with_link(rig: Rig, **changes) -> Reason | None:
    """What a receipt gives whose second of three links was changed."""
    await rig.turns("a", "b", "c")
    receipt = await rig.sealed()
    first, second, third = receipt.chain
    return why(replace(receipt, chain=(first, replace(second, **changes), third)), rig)


@gives(Reason.FOREIGN_CALL)
async def _(rig: Rig):
    return await with_link(rig, call_id="g0.1/1")


@gives(Reason.BROKEN_CHAIN)
async def _(rig: Rig):
    await rig.turns("a", "b", "c")
    receipt = await rig.sealed()
    return why(replace(receipt, chain=(receipt.chain[0], receipt.chain[2])), rig)


@gives(Reason.EMPTY_GENERATION)
async def _(rig: Rig):
    rig.worker.generated = 0
    await rig.turns("a")
    return why(await rig.sealed(), rig)


@gives(Reason.WRONG_STAGING_KEY)
async def _(rig: Rig):
    return await with_link(rig, staging_key="g0.0/1-00000000")


@gives(Reason.WRONG_EXTRAS_DIGEST)
async def _(rig: Rig):
    return await with_link(rig, finish_reason="length")


@gives(Reason.WRONG_ROUTES)
async def _(rig: Rig):
    rig.worker.routes = (2, 3)
    return await with_row(rig, lambda row, carry: {"routed_experts": row.routed_experts + np.int16(1)})


@gives(Reason.MISSING_ROW)
async def _(rig: Rig):
    await rig.turns("a", "b")
    receipt = await rig.sealed()
    del rig.worker.rows[receipt.chain[0].staging_key]
    return why(receipt, rig)


async def with_row(rig: Rig, change: Callable[..., dict[str, np.ndarray]]) -> Reason | None:
    """What a rollout gives whose second staged row was changed."""
    await rig.turns("a", "b")
    receipt = await rig.sealed()
    key = receipt.chain[1].staging_key
    row = rig.worker.rows[key]
    rig.worker.rows[key] = altered(row, **change(row, receipt.chain[1].carry_len))
    return why(receipt, rig)


@gives(Reason.MALFORMED_ROW)
async def _(rig: Rig):
    return await with_row(rig, lambda row, carry: {"token_ids": row.token_ids.astype(np.int32)})


@gives(Reason.WRONG_LENGTH)
async def _(rig: Rig):
    return await with_row(rig, lambda row, carry: {"token_ids": row.token_ids[:-1]})


@gives(Reason.WRONG_MASK)
async def _(rig: Rig):
    return await with_row(rig, lambda row, carry: {"token_mask": row.token_mask[::-1].copy()})


@gives(Reason.BAD_LOGPROBS)
async def _(rig: Rig):
    return await with_row(rig, lambda row, carry: {"logprobs": np.where(row.token_mask, np.nan, row.logprobs)})


@gives(Reason.WRONG_VERSIONS)
async def _(rig: Rig):
    return await with_row(rig, lambda row, carry: {"weight_versions": row.weight_versions + 1})


@gives(Reason.WRONG_CHAIN_HASH)
async def _(rig: Rig):
    return await with_row(rig, lambda row, carry: {"token_ids": row.token_ids + 1})


@gives(Reason.WRONG_CUMULATIVE_HASH)
async def _(rig: Rig):
    return await with_link(rig, cumulative_hash="0" * 64)


@gives(Reason.WRONG_DIGEST)
async def _(rig: Rig):
    return await with_row(rig, lambda row, carry: {"logprobs": row.logprobs * np.float32(0.5)})


async def test_spans_that_do_not_cover_the_generated_tokens_are_wrong_versions():
    spans = (WeightSpan(version=0, start=0, end=1_000),)
    extras = extras_digest(call_extras(spans, "stop"))
    assert await with_link(await started(), weight_spans=spans, extras_digest=extras) is Reason.WRONG_VERSIONS


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.01])
async def test_logprobs_must_be_finite_and_not_positive(bad):
    def change(row, carry):
        logprobs = row.logprobs.copy()
        logprobs[-1] = bad
        return {"logprobs": logprobs}

    assert await with_row(await started(), change) is Reason.BAD_LOGPROBS


async def test_a_prompt_token_with_a_logprob_is_bad():
    assert await with_row(await started(), lambda row, carry: {"logprobs": row.logprobs - 1}) is Reason.BAD_LOGPROBS


async def test_a_negative_token_id_is_malformed():
    assert await with_row(await started(), lambda row, carry: {"token_ids": -row.token_ids}) is Reason.MALFORMED_ROW
