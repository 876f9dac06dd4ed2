"""Events have one byte form, and a rollout's head shows any change to them."""

from __future__ import annotations

from types import UnionType
from typing import Any, get_args, get_origin

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.events import Event, MemoryLog, RolloutEvent, TerminalDeclared, decode, encode, head_of
from tests.ledger.rig import Rig, started

pytestmark = pytest.mark.anyio

INTEGERS = st.integers(0, 1 << 40)
TEXTS = st.text("ab0\u00e9", max_size=3)


def of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an event's field, or an event."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, **{f.name: of(f.type) for f in msgspec.structs.fields(kind)})
    if get_origin(kind) is tuple:
        return st.lists(of(get_args(kind)[0]), max_size=3).map(tuple)
    if isinstance(kind, UnionType):
        return st.one_of([of(member) for member in get_args(kind)])
    return {int: INTEGERS, str: TEXTS}[kind] if kind in (int, str) else st.from_type(kind)


ROLLOUT_EVENTS = st.lists(of(RolloutEvent), min_size=2, max_size=6)


@given(of(Event))
def test_every_event_survives_its_bytes_and_has_only_one_form(event):
    data = encode(event)
    assert decode(data) == event
    assert encode(decode(data)) == data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"event": "NoSuchEvent"}),
        msgspec.msgpack.encode({"event": "GroupTrained", "group_id": "g"}),
        msgspec.msgpack.encode({"event": "GroupTrained", "group_id": "g", "step": "1"}),
        msgspec.msgpack.encode({"event": "GroupTrained", "group_id": "g", "step": 1, "more": 2}),
    ],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(msgspec.DecodeError):
        decode(data)


@given(ROLLOUT_EVENTS, st.data())
def test_the_head_shows_a_dropped_event(events, data):
    i = data.draw(st.integers(0, len(events) - 1))
    assert head_of(events[:i] + events[i + 1 :]) != head_of(events)


@given(ROLLOUT_EVENTS, st.data())
def test_the_head_shows_reordered_events(events, data):
    i, j = data.draw(st.tuples(*[st.integers(0, len(events) - 1)] * 2).filter(lambda p: events[p[0]] != events[p[1]]))
    swapped = list(events)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    assert head_of(swapped) != head_of(events)


@given(ROLLOUT_EVENTS, of(RolloutEvent), st.data())
def test_the_head_shows_an_added_or_replaced_event(events, other, data):
    i = data.draw(st.integers(0, len(events) - 1).filter(lambda i: events[i] != other))
    assert head_of([*events[:i], other, *events[i:]]) != head_of(events)
    assert head_of([*events[:i], other, *events[i + 1 :]]) != head_of(events)


@settings(max_examples=30)
@given(ROLLOUT_EVENTS, st.data())
def test_the_head_shows_every_edited_field(events, data):
    i = data.draw(st.integers(0, len(events) - 1))
    for field in msgspec.structs.fields(type(events[i])):
        other = data.draw(of(field.type).filter(lambda v, f=field: v != getattr(events[i], f.name)))
        edited = msgspec.structs.replace(events[i], **{field.name: other})
        assert head_of([*events[:i], edited, *events[i + 1 :]]) != head_of(events)


async def test_a_receipt_has_the_head_of_exactly_the_events_in_the_log():
    rig = await started()
    await rig.turns("a", "b")
    await rig.ledger.declare_terminal("g0.0", "g0.0/1")
    receipt = await rig.sealed()
    assert receipt.head == head_of(rig.events())
    assert receipt.version == len(rig.events()) == 7


async def test_heads_of_interleaved_rollouts_are_independent():
    rig = Rig()
    await rig.start("x", "y")
    async with anyio.create_task_group() as tg:
        tg.start_soon(lambda: rig.turns("a", "b", rollout_id="x"))
        tg.start_soon(lambda: rig.turns("a", "b", rollout_id="y"))
    for rollout_id in ("x", "y"):
        assert (await rig.sealed(rollout_id)).head == head_of(rig.events(rollout_id))


async def test_the_memory_log_keeps_the_newest_events():
    log = MemoryLog(limit=3)
    for i in range(5):
        await log.append(TerminalDeclared(rollout_id="r", call_id=str(i)))
    assert [e.call_id for e in log.events if isinstance(e, TerminalDeclared)] == ["2", "3", "4"]
