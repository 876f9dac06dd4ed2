"""The terminal call: declared, or singled out by the calls; and which failed calls matter."""

from __future__ import annotations

import pytest

from ledger.errors import CallFailedError, CallRefused
from ledger.reasons import CallFailure, Reason
from ledger.receipts import Receipt
from ledger.records import CallRequest
from tests.ledger.rig import Rig, started
from tests.ledger.worker import assistant, system, user

pytestmark = pytest.mark.anyio


async def failing(rig: Rig, *messages, error: Exception | None = None) -> None:
    """A call that the worker fails."""
    generate = rig.worker.generate

    async def fail(request: CallRequest):
        raise error or RuntimeError("out of luck")

    rig.worker.generate = fail
    with pytest.raises((CallFailedError, CallRefused)):
        await rig.chat(*messages)
    rig.worker.generate = generate


def selected(receipt: Receipt) -> tuple[str | None, str | None]:
    assert receipt.verdict == "trainable", receipt.rejections
    return receipt.terminal, receipt.selection


async def test_a_linear_conversation_ends_in_its_last_call():
    rig = await started()
    await rig.turns("a", "b", "c")
    receipt = await rig.sealed()
    assert selected(receipt) == ("g0.0/2", "unique_leaf")
    assert [link.call_id for link in receipt.chain] == ["g0.0/0", "g0.0/1", "g0.0/2"]


async def test_a_declared_call_wins_over_the_leaf_and_its_rows_end_there():
    rig = await started()
    await rig.turns("a", "b", "c")
    await rig.ledger.declare_terminal("g0.0", "g0.0/1")
    receipt = await rig.sealed()
    assert selected(receipt) == ("g0.0/1", "declared")
    assert len(receipt.chain) == 2
    assert len(receipt.staging_keys) == 3


async def test_the_last_declaration_counts():
    rig = await started()
    await rig.turns("a", "b")
    await rig.ledger.declare_terminal("g0.0", "g0.0/9")
    await rig.ledger.declare_terminal("g0.0", "g0.0/0")
    assert selected(await rig.sealed()) == ("g0.0/0", "declared")


@pytest.mark.parametrize("call_id", ["", "g0.0", "g0.0/", "g0.0/2", "g0.0/-1", "g0.0/00", "g0.1/0", "x" * 5_000])
async def test_a_declaration_that_names_no_call_is_final(call_id):
    rig = await started()
    await rig.turns("a", "b")
    await rig.ledger.declare_terminal("g0.0", call_id)
    assert (await rig.sealed()).reason is Reason.UNKNOWN_TERMINAL


async def test_two_leaves_of_one_conversation_are_ambiguous_until_one_is_declared():
    rig = await started()
    (first,) = await rig.turns("a")
    await rig.chat(user("a"), first.message, user("b"))
    await rig.chat(user("a"), first.message, user("b"))
    assert (rig.ledger.receipt("g0.0").rejections)[-1].reason is Reason.AMBIGUOUS_TERMINAL
    await rig.ledger.declare_terminal("g0.0", "g0.0/1")
    assert selected(await rig.sealed()) == ("g0.0/1", "declared")


async def test_a_retry_with_equal_tokens_is_the_same_leaf():
    rig = await started()
    rig.worker.say, rig.worker.generated = "same", 3
    await rig.chat(user("a"))
    await rig.chat(user("a"))
    assert selected(await rig.sealed()) == ("g0.0/0", "unique_leaf")


async def test_an_abandoned_retry_does_not_hide_the_conversation_that_went_on():
    rig = await started()
    rig.worker.say, rig.worker.generated = "same", 3
    await rig.chat(user("a"))
    retried = await rig.chat(user("a"))
    await rig.chat(user("a"), retried.message, user("b"))
    assert selected(await rig.sealed()) == ("g0.0/2", "unique_leaf")


async def test_a_helper_call_on_the_way_does_not_matter():
    rig = await started()
    (first,) = await rig.turns("a")
    await rig.chat(system("summarise"), user("x"))
    await rig.chat(user("a"), first.message, user("b"))
    receipt = await rig.sealed()
    assert selected(receipt) == ("g0.0/2", "unique_leaf")
    assert [link.call_id for link in receipt.chain] == ["g0.0/0", "g0.0/2"]
    assert len(receipt.staging_keys) == 3


async def test_a_conversation_that_may_have_moved_to_a_new_root_is_ambiguous():
    rig = await started()
    await rig.turns("a", "b")
    await rig.chat(user("the story so far; go on"))
    assert (await rig.sealed()).reason is Reason.AMBIGUOUS_TERMINAL


async def test_two_conversations_that_both_went_on_are_ambiguous():
    rig = await started()
    await rig.turns("a", "b")
    await rig.turns("c", "d")
    assert (await rig.sealed()).reason is Reason.AMBIGUOUS_TERMINAL


async def test_history_that_the_rollout_brings_along_is_prompt_of_a_root():
    rig = await started()
    few_shot = (user("1+1"), assistant("2"), user("2+2"))
    reply = await rig.chat(*few_shot)
    await rig.chat(*few_shot, reply.message, user("3+3"))
    assert selected(await rig.sealed()) == ("g0.0/1", "unique_leaf")


async def test_a_failed_call_that_was_tried_again_does_not_matter():
    rig = await started()
    (first,) = await rig.turns("a")
    await failing(rig, user("a"), first.message, user("b"))
    await rig.chat(user("a"), first.message, user("b"))
    receipt = await rig.sealed()
    assert selected(receipt) == ("g0.0/2", "unique_leaf")
    assert receipt.orphans == ("g0.0/1",)


async def test_a_failed_last_call_is_not_trained_as_a_shorter_rollout():
    rig = await started()
    (first,) = await rig.turns("a")
    await failing(rig, user("a"), first.message, user("b"))
    receipt = await rig.sealed()
    assert receipt.reason is Reason.CALL_FAILED
    assert receipt.staging_keys == (first.coords.staging_key,)


async def test_a_failed_last_call_does_not_matter_to_a_declared_terminal():
    rig = await started()
    (first,) = await rig.turns("a")
    await failing(rig, user("a"), first.message, user("b"))
    await rig.ledger.declare_terminal("g0.0", "g0.0/0")
    assert selected(await rig.sealed()) == ("g0.0/0", "declared")


async def test_a_refused_last_call_ends_the_conversation_before_it():
    rig = await started()
    (first,) = await rig.turns("a")
    await failing(rig, user("a"), first.message, user("b"), error=CallRefused("prompt_too_long", "9 > 8"))
    assert selected(await rig.sealed()) == ("g0.0/0", "unique_leaf")


async def test_a_declared_call_that_failed_is_a_failed_call():
    rig = await started()
    await failing(rig, user("a"))
    await rig.ledger.declare_terminal("g0.0", "g0.0/0")
    assert (await rig.sealed()).reason is Reason.CALL_FAILED


async def test_a_rollout_whose_calls_all_failed_says_so():
    rig = await started()
    await failing(rig, user("a"))
    receipt = await rig.sealed()
    assert receipt.reason is Reason.CALL_FAILED
    assert CallFailure.GENERATION_FAILED in receipt.rejections[0].detail


async def test_an_aborted_rollout_names_what_it_has_staged():
    rig = await started()
    replies = await rig.turns("a", "b")
    await failing(rig, user("c"))
    receipt = await rig.ledger.abort("g0.0", "environment gone")
    assert receipt.verdict == "rejected"
    assert receipt.rejections[0].detail == "environment gone"
    assert receipt.staging_keys == tuple(r.coords.staging_key for r in replies)
    assert receipt.orphans == ("g0.0/2",)
