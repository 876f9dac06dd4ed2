"""Every dispatched rollout has exactly one end, and what is finished is forgotten."""

from __future__ import annotations

import random

import pytest

from ledger.account import Account
from ledger.errors import (
    IllegalTransition,
    JournalFailed,
    LedgerError,
    RolloutClosed,
    UnknownCall,
    UnknownGroup,
    UnknownRollout,
)
from ledger.events import Event, MemoryLog
from ledger.ledger import Ledger
from ledger.reasons import CallFailure, Reason
from tests.ledger.rig import Rig, started
from tests.ledger.worker import user

pytestmark = pytest.mark.anyio


async def finished(rig: Rig, group_id: str, ends: str) -> None:
    """A group with one rollout per letter: verified, rejected or aborted."""
    rollouts = [f"{group_id}.{i}" for i in range(len(ends))]
    await rig.start(*rollouts, group_id=group_id)
    for rollout_id, end in zip(rollouts, ends, strict=True):
        if end == "a":
            await rig.ledger.abort(rollout_id, "gone")
            continue
        if end == "v":
            await rig.turns("x", rollout_id=rollout_id)
        receipt = await rig.sealed(rollout_id)
        await rig.ledger.finalize(rollout_id, receipt.reason)


async def test_a_trained_group_counts_only_its_verified_rollouts_as_trained():
    rig = Rig()
    await finished(rig, "g", "vvra")
    await rig.ledger.committed("g")
    assert rig.ledger.account == Account(dispatched=4, live=4)
    await rig.ledger.trained("g", 7)
    assert rig.ledger.account == Account(dispatched=4, trained=2, dropped=1, aborted=1)


@pytest.mark.parametrize("end", ["dropped", "evicted", "aborted"])
async def test_any_other_end_is_the_end_of_all_rollouts(end):
    rig = Rig()
    await finished(rig, "g", "vra")
    await getattr(rig.ledger, end)("g", "a reason")
    assert rig.ledger.account == Account(dispatched=3, **{end: 3})


async def test_a_lost_rollout_is_played_again_under_a_new_id_and_both_are_accounted_for():
    rig = Rig()
    await rig.start("g.0", "g.1", group_id="g")
    await rig.ledger.abort("g.0", "its worker died")
    await rig.ledger.replaced("g", "g.0", "g.0r1")
    assert rig.ledger.account == Account(dispatched=3, live=3)
    with pytest.raises(IllegalTransition, match="committed"):
        await rig.ledger.committed("g")
    await rig.ledger.open("g.0r1", "g")
    for rollout_id in ("g.0r1", "g.1"):
        await rig.turns("x", rollout_id=rollout_id)
        await rig.ledger.finalize(rollout_id, (await rig.sealed(rollout_id)).reason)
    await rig.ledger.committed("g")
    await rig.ledger.trained("g", 0)
    assert rig.ledger.account == Account(dispatched=3, trained=2, aborted=1)


async def test_only_an_aborted_rollout_of_a_live_group_is_replaced_and_only_once():
    rig = Rig()
    await finished(rig, "g", "va")
    for rollout_id, by in (("g.0", "x"), ("g.9", "x"), ("g.1", "g.0")):
        with pytest.raises(IllegalTransition):
            await rig.ledger.replaced("g", rollout_id, by)
    await rig.ledger.replaced("g", "g.1", "x")
    with pytest.raises(IllegalTransition, match="replaced"):
        await rig.ledger.replaced("g", "g.1", "y")
    with pytest.raises(RolloutClosed, match="replaced"):
        rig.ledger.call_count("g.1")
    with pytest.raises(UnknownGroup):
        await rig.ledger.replaced("other", "g.1", "z")


async def held_out(rig: Rig, group_id: str, ends: str) -> None:
    """Like `finished`."""
    rollouts = [f"{group_id}.{i}" for i in range(len(ends))]
    await rig.ledger.dispatched(group_id, "prompt", rollouts, 0, held_out=True)
    for rollout_id, end in zip(rollouts, ends, strict=True):
        await rig.ledger.open(rollout_id, group_id)
        if end == "v":
            await rig.turns("x", rollout_id=rollout_id)
        await rig.ledger.finalize(rollout_id, (await rig.sealed(rollout_id)).reason)


async def test_held_out_groups_are_in_no_account_and_cannot_be_trained():
    rig = Rig()
    await finished(rig, "g", "v")
    before, last = rig.ledger.account, rig.ledger.last_group
    await held_out(rig, "e", "vr")
    for verb in (
        rig.ledger.committed("e"),
        rig.ledger.trained("e", 0),
        rig.ledger.dropped("e", ""),
        rig.ledger.evicted("e"),
    ):
        with pytest.raises(IllegalTransition, match="held out"):
            await verb
    with pytest.raises(IllegalTransition, match="is not held out: it cannot be evaluated"):
        await rig.ledger.evaluated("g", 0)
    assert (rig.ledger.account, rig.ledger.last_group) == (before, last)
    await rig.ledger.evaluated("e", 0)
    assert rig.ledger.account == before
    with pytest.raises(UnknownGroup, match="already ended"):
        await rig.ledger.evaluated("e", 0)


async def test_a_held_out_group_is_evaluated_only_when_finished_and_may_be_given_up():
    rig = Rig()
    await rig.ledger.dispatched("e", "prompt", ["e.0"], 0, held_out=True)
    await rig.ledger.open("e.0", "e")
    await rig.ledger.abort("e.0", "its worker died")
    await rig.ledger.replaced("e", "e.0", "e.0r1")
    with pytest.raises(IllegalTransition, match="unfinished"):
        await rig.ledger.evaluated("e", 0)
    await rig.ledger.give_up("the run ended")
    assert rig.ledger.account == Account()


async def test_all_that_is_live_is_given_up_although_the_record_of_it_fails():
    class Disk(MemoryLog):
        full = False

        async def append(self, event: Event) -> None:
            if self.full:
                raise JournalFailed("ledger", "no space")
            await super().append(event)

    disk = Disk()
    rig = Rig(disk)
    for group_id in ("g0", "g1"):
        await rig.start(*(f"{group_id}.{i}" for i in range(3)), group_id=group_id)
    disk.full = True
    with pytest.raises(JournalFailed):
        await rig.ledger.give_up("the run ended")
    assert rig.ledger.account == Account(dispatched=6, aborted=6)


async def test_a_second_end_is_refused():
    rig = Rig()
    await finished(rig, "g", "v")
    await rig.ledger.committed("g")
    await rig.ledger.trained("g", 0)
    before = rig.ledger.account
    for again in (
        rig.ledger.trained("g", 0),
        rig.ledger.dropped("g", ""),
        rig.ledger.evicted("g"),
        rig.ledger.aborted("g", ""),
        rig.ledger.committed("g"),
    ):
        with pytest.raises(UnknownGroup, match="already ended"):
            await again
    assert rig.ledger.account == before


async def test_a_group_is_trained_only_when_committed_and_committed_only_when_finished():
    rig = Rig()
    await rig.start("x", "y", group_id="g")
    await rig.ledger.abort("x", "")
    with pytest.raises(IllegalTransition, match="unfinished"):
        await rig.ledger.committed("g")
    await rig.ledger.abort("y", "")
    with pytest.raises(IllegalTransition, match="not committed"):
        await rig.ledger.trained("g", 0)
    await rig.ledger.committed("g")
    with pytest.raises(IllegalTransition, match="committed"):
        await rig.ledger.committed("g")
    await rig.ledger.trained("g", 0)


@pytest.mark.parametrize("end", ["dropped", "evicted", "aborted"])
async def test_a_group_with_a_running_rollout_cannot_end(end):
    rig = await started()
    with pytest.raises(IllegalTransition, match="running"):
        await getattr(rig.ledger, end)("g0", "reason")
    await rig.ledger.abort("g0.0", "")
    await getattr(rig.ledger, end)("g0", "reason")


async def test_rollouts_are_dispatched_once_and_opened_once():
    rig = await started()
    with pytest.raises(IllegalTransition, match="dispatched again"):
        await rig.ledger.dispatched("g0", "p", ["other"], 0)
    with pytest.raises(IllegalTransition, match="dispatched again"):
        await rig.ledger.dispatched("g1", "p", ["new", "g0.0"], 0)
    for bad in ([], ["a", "a"]):
        with pytest.raises(IllegalTransition, match="distinct"):
            await rig.ledger.dispatched("g1", "p", bad, 0)
    with pytest.raises(IllegalTransition, match="running"):
        await rig.ledger.open("g0.0", "g0")
    with pytest.raises(IllegalTransition, match="not dispatched"):
        await rig.ledger.open("g0.1", "g0")
    with pytest.raises(UnknownGroup):
        await rig.ledger.open("g0.0", "g1")
    for illegal in ("", "a/b", "a b", ".a", "a" * 129):
        with pytest.raises(ValueError, match="rollout id"):
            await rig.ledger.dispatched("g1", "p", [illegal], 0)
    assert rig.ledger.account == Account(dispatched=1, live=1)


async def test_a_refused_step_is_not_logged():
    rig = await started()
    await rig.sealed()
    logged = list(rig.log.events)
    for refused in (
        rig.ledger.seal("g0.0"),
        rig.ledger.declare_terminal("g0.0", "x"),
        rig.chat(user("late")),
        rig.ledger.finalize("g0.0", None),
        rig.ledger.committed("g0"),
        rig.ledger.fail("g0.0/0", CallFailure.TIMEOUT, ""),
    ):
        with pytest.raises(LedgerError):
            await refused
    assert list(rig.log.events) == logged


async def test_a_rejected_rollout_cannot_be_finalized_as_verified():
    rig = await started()
    with pytest.raises(IllegalTransition):
        await rig.ledger.finalize("g0.0", None)
    with pytest.raises(IllegalTransition, match="open"):
        await rig.ledger.finalize("g0.0", Reason.NO_CALLS)
    await rig.sealed()
    with pytest.raises(IllegalTransition, match="rejected"):
        await rig.ledger.finalize("g0.0", None)
    await rig.ledger.finalize("g0.0", Reason.NO_CALLS)


async def test_late_calls_are_told_that_the_rollout_is_closed():
    rig = await started()
    (reply,) = await rig.turns("a")
    await rig.sealed()
    with pytest.raises(RolloutClosed, match="sealed"):
        await rig.chat(user("late"))
    await rig.ledger.finalize("g0.0", None)
    with pytest.raises(RolloutClosed, match="verified"):
        await rig.chat(user("late"))
    with pytest.raises(RolloutClosed, match="verified"):
        await rig.ledger.commit(reply)
    await rig.ledger.committed("g0")
    await rig.ledger.trained("g0", 0)
    with pytest.raises(UnknownRollout, match="forgotten"):
        await rig.chat(user("late"))


async def test_unknown_rollouts_and_calls_are_named():
    rig = await started()
    with pytest.raises(UnknownRollout, match="'nobody'"):
        await rig.chat(user("a"), rollout_id="nobody")
    for call_id in ("g0.0/0", "g0.0/x", "g0.0/99999999999999999999"):
        with pytest.raises(UnknownCall, match=call_id):
            await rig.ledger.fail(call_id, CallFailure.TIMEOUT, "")
    with pytest.raises(UnknownRollout):
        await rig.ledger.fail("nonsense", CallFailure.TIMEOUT, "")


async def test_nothing_of_a_finished_group_stays_in_memory():
    rig = Rig(MemoryLog(limit=1))
    for i in range(50):
        await finished(rig, f"g{i}", "vra")
        await rig.ledger.committed(f"g{i}")
        await rig.ledger.trained(f"g{i}", i)
    state = vars(rig.ledger) | vars(rig.ledger._groups)
    assert [len(state[name]) for name in ("_rollouts", "_live", "_group_of")] == [0, 0, 0]
    assert rig.ledger.account == Account(dispatched=150, trained=50, dropped=50, aborted=50)


@pytest.mark.parametrize("seed", range(5))
async def test_a_restored_ledger_goes_on_where_the_log_ended(seed):
    rng = random.Random(seed)
    rig = Rig()
    for i in range(4):
        await finished(rig, f"g{i}", "".join(rng.choices("vra", k=3)))
        if rng.random() < 0.5:
            await rig.ledger.committed(f"g{i}")
            await rig.ledger.trained(f"g{i}", i)
        else:
            await rig.ledger.evicted(f"g{i}")
    await rig.start("open", group_id="last")
    (first,) = await rig.turns("a", rollout_id="open")
    await rig.ledger.checkpointed(3)
    log = MemoryLog()
    restored = Ledger(log)
    restored.restore(rig.log.events)
    assert restored.account == rig.ledger.account
    assert restored.receipt("open") == rig.ledger.receipt("open")
    assert not log.events
    again = Rig(ledger=restored, worker=rig.worker)
    second = await again.chat(user("a"), first.message, user("b"), rollout_id="open")
    assert second.coords.parent_call_id == first.coords.call_id
    assert (await restored.seal("open")).verdict == "trainable"


async def test_a_log_with_an_impossible_step_is_not_restored():
    rig = await started()
    await rig.turns("a", "b")
    events: list[Event] = list(rig.log.events)
    for i in range(len(events) - 1):
        with pytest.raises(LedgerError):
            Ledger(MemoryLog()).restore(events[:i] + events[i + 1 :])
    with pytest.raises(LedgerError):
        Ledger(MemoryLog()).restore([*events, events[1]])


def test_lost_and_duplicated_follow_from_the_counts():
    assert Account(dispatched=5, trained=2, live=1).lost == 2
    assert Account(dispatched=2, trained=2, live=1).duplicated == 1
    even = Account(dispatched=4, trained=1, evicted=1, dropped=1, live=1)
    assert (even.lost, even.duplicated, even.ended) == (0, 0, 3)


async def test_texts_from_outside_are_bounded_and_made_encodable():
    rig = await started()
    await rig.ledger.abort("g0.0", "\ud800" + "x" * 10_000)
    assert len(rig.events()[-1].reason) == 2_000
