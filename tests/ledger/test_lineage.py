"""A call's parent is the call whose request and answer are exactly its history; everything else is a new root."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.events import CallAdmitted, Lineage
from ledger.lineage import extend, fingerprint
from ledger.records import FunctionCall, Message, ToolCall
from tests.ledger.rig import Rig, started
from tests.ledger.worker import assistant, system, user

pytestmark = pytest.mark.anyio

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
}


def lineages(rig: Rig) -> list[tuple[Lineage, str | None]]:
    return [(e.lineage, e.parent_call_id) for e in rig.events() if isinstance(e, CallAdmitted)]


def tool_call(arguments: str, call_id: str = "t1") -> Message:
    call = ToolCall(id=call_id, function=FunctionCall(name="add", arguments=arguments))
    return Message(role="assistant", tool_calls=(call,))


async def test_each_turn_continues_the_one_before():
    rig = await started()
    replies = await rig.turns("a", "b", "c")
    assert lineages(rig) == [
        (Lineage.ROOT, None),
        (Lineage.CONTINUED, "g0.0/0"),
        (Lineage.CONTINUED, "g0.0/1"),
    ]
    assert [r.coords.prev_len for r in replies] == [0, replies[0].coords.cum_len, replies[1].coords.cum_len]


async def test_the_parent_coordinates_name_the_whole_chain_and_what_it_covers():
    rig = await started()
    first, second = await rig.turns("a", "b")
    history = (user("a"), first.message, user("b"), second.message)
    admission = await rig.ledger.admit("g0.0", fingerprint((*history, user("c"), user("d"))))
    assert admission.parent is not None
    assert admission.parent.call_id == second.coords.call_id
    assert admission.parent.staging_keys == (first.coords.staging_key, second.coords.staging_key)
    assert admission.parent.cum_len == second.coords.cum_len
    assert admission.parent.chain_hash == second.coords.chain_hash
    assert admission.parent.cumulative_hash == second.coords.cumulative_hash
    assert admission.parent.messages == 4


@pytest.mark.parametrize(
    "edit",
    [
        lambda u, a: (user(u + "!"), a, user("b")),
        lambda u, a: (user(u), assistant((a.content or "") + " "), user("b")),
        lambda u, a: (system("s"), user(u), a, user("b")),
        lambda u, a: (a, user("b")),
        lambda u, a: (user(u), a, a, user("b")),
        lambda u, a: (user(u), a, user("b"), assistant("invented"), user("c")),
        lambda u, a: (user(u), Message(role="assistant", content=a.content, name="x"), user("b")),
        lambda u, a: (user(u), a),
    ],
    ids=["user", "answer", "system", "dropped", "doubled", "invented turn", "name", "no next turn"],
)
async def test_changed_history_is_a_fork(edit):
    rig = await started()
    reply = await rig.chat(user("a"))
    await rig.chat(*edit("a", reply.message))
    assert lineages(rig)[1] == (Lineage.FORK, None)


async def test_other_tools_are_a_fork_and_reordered_ones_are_not():
    rig = await started()
    reply = await rig.chat(user("a"), tools=[TOOL])
    conversation = (user("a"), reply.message, user("b"))
    await rig.chat(*conversation)
    await rig.chat(*conversation, tools=[dict(reversed(TOOL.items()))])
    assert lineages(rig)[1:] == [(Lineage.FORK, None), (Lineage.CONTINUED, "g0.0/0")]


async def test_a_call_of_another_rollout_is_never_a_parent():
    rig = Rig()
    await rig.start("x", "y")
    reply = await rig.chat(user("a"), rollout_id="x")
    await rig.chat(user("a"), reply.message, user("b"), rollout_id="y")
    (admitted,) = [e for e in rig.events("y") if isinstance(e, CallAdmitted)]
    assert (admitted.lineage, admitted.parent_call_id) == (Lineage.FORK, None)


async def test_retries_with_equal_tokens_count_as_one_parent():
    rig = await started()
    rig.worker.say, rig.worker.generated = "same", 4
    await rig.chat(user("a"))
    reply = await rig.chat(user("a"))
    await rig.chat(user("a"), reply.message, user("b"))
    assert lineages(rig)[2] == (Lineage.CONTINUED, "g0.0/0")


async def test_retries_with_equal_text_and_other_tokens_are_ambiguous():
    rig = await started()
    rig.worker.say = "same"
    for rig.worker.generated in (3, 4):
        reply = await rig.chat(user("a"))
    await rig.chat(user("a"), reply.message, user("b"))
    assert lineages(rig)[2] == (Lineage.AMBIGUOUS, None)


async def test_an_unanswered_call_is_no_parent():
    rig = await started()
    await rig.ledger.admit("g0.0", fingerprint([user("a")]))
    admission = await rig.ledger.admit("g0.0", fingerprint([user("a"), assistant("x"), user("b")]))
    assert admission.lineage is Lineage.FORK


def test_equal_in_meaning_is_equal_in_fingerprint():
    plain = fingerprint([user("a"), tool_call('{"a": 1, "b": [2]}')])
    assert fingerprint([user("a"), tool_call('{"b":[2],"a":1}')]) == plain
    assert fingerprint([user("a"), tool_call('{"a": 2, "b": [2]}')]) != plain
    assert fingerprint([user("a"), tool_call('{"a": 1, "b": [2]}', call_id="t2")]) != plain
    assert fingerprint([Message(role="assistant", content="")]) == fingerprint([Message(role="assistant")])
    thought = Message(role="assistant", content="x", reasoning_content="hm")
    assert fingerprint([thought]) == fingerprint([assistant("x")])


@pytest.mark.parametrize("arguments", ["", "{", "not json", "[" * 100_000])
def test_arguments_that_are_not_json_stand_for_themselves(arguments):
    assert fingerprint([tool_call(arguments)]) == fingerprint([tool_call(arguments)])
    assert fingerprint([tool_call(arguments)]) != fingerprint([tool_call(arguments + "x")])


MESSAGES = st.lists(
    st.builds(
        Message,
        role=st.sampled_from(["system", "user", "assistant", "tool"]),
        content=st.sampled_from(["", "a", "b", "ab"]),
        tool_call_id=st.sampled_from([None, "t"]),
        name=st.sampled_from([None, "a"]),
    ),
    max_size=4,
)


@given(MESSAGES, MESSAGES)
def test_fingerprints_are_equal_exactly_for_equal_messages(one, other):
    assert (fingerprint(one).request == fingerprint(other).request) == (one == other)


@given(MESSAGES, MESSAGES)
def test_the_history_is_the_fingerprint_of_everything_up_to_the_last_answer(before, after):
    tail = [m for m in after if m.role != "assistant"]
    whole = fingerprint([*before, assistant("x"), *tail])
    assert whole.history == extend(fingerprint(before).request, assistant("x"))
    assert (whole.history_messages, whole.messages) == (len(before) + 1, len(before) + 1 + len(tail))
    assert fingerprint(tail).history is None
