"""A rollout's conversations as rows: which there are, which one trains a token, and what one that is not proven costs."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from ledger.branches import VerifiedRollout, verify_rollout
from ledger.events import MemoryLog
from ledger.ledger import Ledger
from ledger.reasons import Reason, Rejection
from ledger.receipts import rebuild
from ledger.records import CallReply, CallRequest
from tests.ledger.rig import Rig
from tests.ledger.worker import altered, assistant, system, user

pytestmark = pytest.mark.anyio


async def branching(trajectory="branches") -> Rig:
    log = MemoryLog()
    rig = Rig(log, ledger=Ledger(log, trajectory=trajectory))
    await rig.start()
    return rig


async def rows_of(rig: Rig) -> VerifiedRollout:
    result = verify_rollout(await rig.sealed(), rig.worker.rows)
    assert isinstance(result, VerifiedRollout), result
    return result


async def rejected(rig: Rig) -> Reason:
    result = verify_rollout(await rig.sealed(), rig.worker.rows)
    assert isinstance(result, Rejection), result
    return result.reason


def each_generated_token_once(rig: Rig, rollout: VerifiedRollout, *replies: CallReply) -> None:
    """Every row is its conversation's exact tokens, and exactly the tokens of `replies` are trained, each once."""
    trained: list[tuple[str, int]] = []
    for row in rollout.rows:
        whole = rig.worker.tokens[row.leaf]
        assert row.input_ids.tolist() == whole
        assert row.loss_tokens == row.loss_mask.sum() > 0
        assert not row.rollout_logprobs[row.loss_mask == 0].any()
        assert row.oldest_version == row.weight_versions[row.loss_mask == 1].min()
        for position in np.flatnonzero(row.loss_mask):
            owner = next(
                call
                for call, tokens in sorted(rig.worker.tokens.items(), key=lambda item: len(item[1]))
                if tokens == whole[: len(tokens)] and len(tokens) > position
            )
            trained.append((owner, int(position)))
    assert len(trained) == len(set(trained))
    assert len(trained) == sum(reply.completion_tokens for reply in replies)


async def test_a_linear_conversation_has_one_row_under_either_trajectory():
    for trajectory in ("terminal", "branches"):
        rig = await branching(trajectory)
        replies = await rig.turns("a", "b", "c")
        rollout = await rows_of(rig)
        assert [row.leaf for row in rollout.rows] == ["g0.0/2"]
        each_generated_token_once(rig, rollout, *replies)


async def test_a_shared_beginning_is_trained_in_the_terminal_conversations_row_only():
    rig = await branching()
    (first,) = await rig.turns("a")
    left = await rig.chat(user("a"), first.message, user("b"))
    right = await rig.chat(user("a"), first.message, user("c"))
    await rig.ledger.declare_terminal("g0.0", right.coords.call_id)
    rollout = await rows_of(rig)
    assert [row.leaf for row in rollout.rows] == ["g0.0/2", "g0.0/1"]
    terminal, other = rollout.rows
    assert terminal.loss_tokens == first.completion_tokens + right.completion_tokens
    assert other.loss_tokens == left.completion_tokens
    each_generated_token_once(rig, rollout, first, left, right)


async def test_sub_agents_and_the_history_before_a_compaction_have_rows_of_their_own():
    rig = await branching()
    before = await rig.turns("a", "b")
    helper = await rig.chat(system("summarise"), user("a, b"))
    after = await rig.chat(user("the story so far"))
    on = await rig.chat(user("the story so far"), after.message, user("d"))
    receipt = rig.ledger.receipt("g0.0")
    assert (receipt.terminal, receipt.selection) == (None, None)
    rollout = await rows_of(rig)
    assert [row.leaf for row in rollout.rows] == ["g0.0/1", "g0.0/2", "g0.0/4"]
    each_generated_token_once(rig, rollout, *before, helper, after, on)


async def test_a_declared_call_in_mid_conversation_ends_its_row_and_the_rest_is_a_branch():
    rig = await branching()
    replies = await rig.turns("a", "b", "c")
    await rig.ledger.declare_terminal("g0.0", "g0.0/1")
    rollout = await rows_of(rig)
    assert [row.leaf for row in rollout.rows] == ["g0.0/1", "g0.0/2"]
    assert rollout.rows[1].loss_tokens == replies[2].completion_tokens
    each_generated_token_once(rig, rollout, *replies)


async def test_retries_with_equal_tokens_are_one_branch():
    rig = await branching()
    rig.worker.say, rig.worker.generated = "same", 3
    first = await rig.chat(user("a"))
    again = await rig.chat(user("a"))
    assert first.coords.cumulative_hash == again.coords.cumulative_hash
    rollout = await rows_of(rig)
    assert [row.leaf for row in rollout.rows] == ["g0.0/0"]
    each_generated_token_once(rig, rollout, first)


async def test_what_edited_history_repeats_is_context_and_not_trained_again():
    rig = await branching()
    first, second = await rig.turns("a", "b")
    edited = await rig.chat(user("a"), first.message, user("B"), assistant("edited"), user("c"))
    rollout = await rows_of(rig)
    assert [row.leaf for row in rollout.rows] == ["g0.0/1", "g0.0/2"]
    assert rollout.rows[1].loss_tokens == edited.completion_tokens
    each_generated_token_once(rig, rollout, first, second, edited)


async def test_a_branch_that_is_not_proven_is_left_out_beside_a_proven_terminal():
    rig = await branching()
    main = await rig.turns("a", "b")
    helper = await rig.chat(system("help"), user("x"))
    await rig.ledger.declare_terminal("g0.0", "g0.0/1")
    key = helper.coords.staging_key
    rig.worker.rows[key] = altered(rig.worker.rows[key], token_ids=rig.worker.rows[key].token_ids + 1)
    rollout = await rows_of(rig)
    assert [row.leaf for row in rollout.rows] == ["g0.0/1"]
    assert [rejection.reason for rejection in rollout.left_out] == [Reason.WRONG_CHAIN_HASH]
    each_generated_token_once(rig, rollout, *main)


async def test_a_branch_that_is_not_proven_rejects_a_rollout_whose_end_is_not_known():
    rig = await branching()
    await rig.turns("a", "b")
    helper = await rig.chat(system("help"), user("x"))
    del rig.worker.rows[helper.coords.staging_key]
    assert await rejected(rig) is Reason.MISSING_ROW


async def test_a_terminal_that_is_not_proven_rejects_the_rollout():
    rig = await branching()
    first, _ = await rig.turns("a", "b")
    await rig.chat(system("help"), user("x"))
    await rig.ledger.declare_terminal("g0.0", "g0.0/1")
    del rig.worker.rows[first.coords.staging_key]
    assert await rejected(rig) is Reason.MISSING_ROW


async def test_the_tokens_of_a_branch_that_is_left_out_are_trained_where_else_they_are():
    rig = await branching()
    (first,) = await rig.turns("a")
    left = await rig.chat(user("a"), first.message, user("b"))
    right = await rig.chat(user("a"), first.message, user("c"))
    helper = await rig.chat(system("help"), user("x"))
    await rig.ledger.declare_terminal("g0.0", helper.coords.call_id)
    del rig.worker.rows[left.coords.staging_key]
    rollout = await rows_of(rig)
    assert [row.leaf for row in rollout.rows] == ["g0.0/3", "g0.0/2"]
    each_generated_token_once(rig, rollout, helper, first, right)


async def test_a_failed_last_call_rejects_the_rollout_under_branches_too():
    rig = await branching()
    await rig.turns("a", "b")
    await rig.turns("c")
    generate = rig.worker.generate

    async def fail(request: CallRequest) -> CallReply:
        raise RuntimeError("out of luck")

    rig.worker.generate = fail
    with pytest.raises(Exception, match="out of luck"):
        await rig.chat(user("d"))
    rig.worker.generate = generate
    assert await rejected(rig) is Reason.CALL_FAILED


@pytest.mark.parametrize("trajectory", ["terminal", "branches"])
async def test_a_receipt_can_be_rebuilt_from_the_events_alone(trajectory):
    rig = await branching(trajectory)
    await rig.turns("a", "b")
    await rig.turns("c")
    await rig.ledger.witness("g0.0", response_id="chatcmpl-g0.0/1")
    receipt = await rig.sealed()
    assert receipt == rebuild(rig.events())
    assert (receipt.terminal, receipt.selection) == ("g0.0/1", "witnessed")
    assert len(receipt.conversations) == (1 if trajectory == "terminal" else 2)


async def test_a_receipt_whose_branches_were_altered_is_rejected():
    rig = await branching()
    (first,) = await rig.turns("a")
    await rig.chat(user("a"), first.message, user("b"))
    await rig.chat(user("a"), first.message, user("c"))
    receipt = await rig.sealed()
    one, two = receipt.branches
    crossed = replace(receipt, branches=(one, (one[0], replace(two[1], call_id=one[1].call_id))))
    assert isinstance(verify_rollout(crossed, rig.worker.rows), Rejection)
    foreign = replace(receipt, rollout_id="g0.1")
    assert isinstance(verify_rollout(foreign, rig.worker.rows), Rejection)
    assert isinstance(verify_rollout(replace(receipt, branches=()), rig.worker.rows), Rejection)
    assert isinstance(verify_rollout(replace(receipt, branches=((),)), rig.worker.rows), Rejection)


async def test_witnesses_pick_the_scored_conversation():
    rig = await branching("terminal")
    (kept,) = await rig.turns("a")
    await rig.turns("b")
    assert rig.ledger.receipt("g0.0").rejections[-1].reason is Reason.AMBIGUOUS_TERMINAL
    await rig.ledger.witness("g0.0", content=kept.message.content)
    receipt = await rig.sealed()
    assert (receipt.terminal, receipt.selection) == ("g0.0/0", "witnessed")


async def test_a_witness_that_fits_no_answer_or_several_says_nothing():
    rig = await branching("terminal")
    rig.worker.say = "same"
    await rig.turns("a", "b")
    for content in ("never said", "same"):
        await rig.ledger.witness("g0.0", response_id="chatcmpl-g0.0/7", content=content)
        receipt = rig.ledger.receipt("g0.0")
        assert (receipt.terminal, receipt.selection) == ("g0.0/1", "unique_leaf")


async def test_a_declaration_counts_for_more_than_witnesses():
    rig = await branching("terminal")
    first, second = await rig.turns("a", "b")
    await rig.ledger.witness("g0.0", response_id=first.coords.call_id, content=first.message.content)
    await rig.ledger.declare_terminal("g0.0", second.coords.call_id)
    receipt = await rig.sealed()
    assert (receipt.terminal, receipt.selection) == ("g0.0/1", "declared")
