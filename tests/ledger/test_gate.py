"""Every call through the gate is settled, whatever happens to it, and no answer leaves before it is on record."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
from msgspec.structs import replace

from ledger.errors import CallFailedError, CallRefused, IllegalTransition, RolloutClosed, TooManyCalls
from ledger.events import CallAdmitted, CallCommitted, CallFailed, Event, MemoryLog
from ledger.lineage import fingerprint
from ledger.reasons import CallFailure, Reason
from ledger.records import CallReply, CallRequest, WeightSpan
from ledger.verify import VerifiedRow
from tests.ledger.rig import Rig, started
from tests.ledger.worker import user

pytestmark = pytest.mark.anyio


class Stops:
    """Counts the suspensions of a call and cancels `scope` at the `at`-th."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.count = 0
        self.scope: anyio.CancelScope | None = None

    async def __call__(self) -> None:
        if self.count == self.at and self.scope is not None:
            self.scope.cancel()
        self.count += 1
        await anyio.lowlevel.checkpoint()


class StoppingLog(MemoryLog):
    def __init__(self) -> None:
        super().__init__()
        self.stop = Stops(None)

    async def append(self, event: Event) -> None:
        self.events.append(event)
        await self.stop()
        await self.stop()


async def second_call_cancelled_at(stop: int | None) -> tuple[Rig, Stops, CallReply | None]:
    """A rollout with one answered call, whose second call is cancelled at its `stop`-th suspension."""
    log = StoppingLog()
    rig = await started(log=log)
    (first,) = await rig.turns("a")
    log.stop = stops = Stops(stop)
    generate = rig.worker.generate

    async def stopping(request: CallRequest) -> CallReply:
        await stops()
        reply = await generate(request)
        await stops()
        return reply

    rig.worker.generate = stopping
    reply = None
    with anyio.CancelScope() as stops.scope:
        reply = await rig.chat(user("a"), first.message, user("b"))
    stops.scope = None
    return rig, stops, reply


async def test_a_call_cancelled_at_any_suspension_is_settled_on_record():
    _, stops, reply = await second_call_cancelled_at(None)
    assert reply is not None
    assert stops.count == 6  # Two of the admission, two of the generation, two of the commit.
    for stop in range(stops.count):
        rig, _, reply = await second_call_cancelled_at(stop)
        assert reply is None
        events = rig.events()
        assert isinstance(events[3], CallAdmitted)
        settled = events[4]
        if stop < 4:
            assert isinstance(settled, CallFailed)
            assert settled.reason is CallFailure.CANCELLED
        else:
            assert isinstance(settled, CallCommitted)
        assert len(events) == 5
        receipt = await rig.sealed()
        assert Reason.UNSETTLED_CALL not in [r.reason for r in receipt.rejections]
        assert receipt.reason is (Reason.CALL_FAILED if stop < 4 else None)


async def test_generation_waits_for_the_admission_to_be_durable_and_the_answer_for_the_commit():
    class HoldingLog(MemoryLog):
        def __init__(self) -> None:
            super().__init__()
            self.durable = anyio.Event()

        async def append(self, event: Event) -> None:
            self.events.append(event)
            if isinstance(event, CallAdmitted | CallCommitted):
                await self.durable.wait()

    log = HoldingLog()
    rig = await started(log=log)
    replies: list[CallReply] = []

    async def chat() -> None:
        replies.append(await rig.chat(user("a")))

    async with anyio.create_task_group() as tg:
        tg.start_soon(chat)
        await anyio.wait_all_tasks_blocked()
        assert isinstance(log.events[-1], CallAdmitted)
        assert not rig.worker.rows
        released, log.durable = log.durable, anyio.Event()
        released.set()
        await anyio.wait_all_tasks_blocked()
        assert isinstance(log.events[-1], CallCommitted)
        assert not replies
        log.durable.set()
    assert replies


@pytest.mark.parametrize("cancelled_in", [CallAdmitted, None], ids=["admission", "generation"])
async def test_a_cancelled_call_is_left_only_when_its_failure_is_durable(cancelled_in):
    durable, waiting = anyio.Event(), anyio.Event()

    class SlowLog(MemoryLog):
        async def append(self, event: Event) -> None:
            self.events.append(event)
            if isinstance(event, CallFailed):
                await durable.wait()
            elif cancelled_in is not None and isinstance(event, cancelled_in):
                waiting.set()
                await anyio.sleep_forever()

    async def hang(request: CallRequest) -> CallReply:
        waiting.set()
        await anyio.sleep_forever()
        raise AssertionError

    rig = await started(log=SlowLog())
    rig.worker.generate = hang
    left = anyio.Event()

    async def chat(scope: anyio.CancelScope) -> None:
        with scope:
            await rig.chat(user("a"))
        left.set()

    async with anyio.create_task_group() as tg:
        scope = anyio.CancelScope()
        tg.start_soon(chat, scope)
        await waiting.wait()
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert isinstance(rig.events()[-1], CallFailed)
        assert not left.is_set()
        durable.set()
        with anyio.fail_after(10):
            await left.wait()


async def test_a_log_that_hangs_cannot_hold_a_cancelled_call():
    class HangingLog(MemoryLog):
        async def append(self, event: Event) -> None:
            self.events.append(event)
            if isinstance(event, CallAdmitted | CallFailed):
                await anyio.sleep_forever()

    rig = await started(log=HangingLog(), settle_timeout_s=0.01)
    with anyio.fail_after(10):
        with anyio.move_on_after(0.01):
            await rig.chat(user("a"))
    assert isinstance(rig.events()[-1], CallFailed)


@pytest.mark.parametrize("kind", [CallAdmitted, CallCommitted, CallFailed])
async def test_a_log_that_fails_gives_no_answer(kind):
    class FailingLog(MemoryLog):
        async def append(self, event: Event) -> None:
            if isinstance(event, kind):
                raise OSError("disk full")
            await super().append(event)

    rig = await started(log=FailingLog())
    if kind is CallFailed:
        rig.worker.rows = None  # type: ignore[assignment]
    with pytest.raises(OSError, match="disk full"):
        await rig.chat(user("a"))


async def test_a_failing_worker_fails_the_call_with_its_own_error_as_the_cause():
    rig = await started()

    async def fail(request: CallRequest) -> CallReply:
        raise ConnectionError("worker gone")

    rig.worker.generate = fail
    with pytest.raises(CallFailedError, match="ConnectionError: worker gone") as caught:
        await rig.chat(user("a"))
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert caught.value.reason is CallFailure.GENERATION_FAILED
    (failed,) = [e for e in rig.events() if isinstance(e, CallFailed)]
    assert (failed.call_id, failed.detail) == ("g0.0/0", "ConnectionError: worker gone")


async def test_a_worker_that_never_answers_is_cut_off_at_the_deadline():
    rig = await started(call_timeout_s=0.02)
    cancelled = False

    async def hang(request: CallRequest) -> CallReply:
        nonlocal cancelled
        try:
            await anyio.sleep_forever()
        finally:
            cancelled = True
        raise AssertionError

    rig.worker.generate = hang
    with anyio.fail_after(10):
        with pytest.raises(CallFailedError, match=r"no answer within 0\.02 s") as caught:
            await rig.chat(user("a"))
    assert caught.value.reason is CallFailure.TIMEOUT
    assert cancelled


async def test_a_timeout_inside_the_worker_is_the_workers_failure():
    rig = await started()

    async def fail(request: CallRequest) -> CallReply:
        raise TimeoutError("its own")

    rig.worker.generate = fail
    with pytest.raises(CallFailedError) as caught:
        await rig.chat(user("a"))
    assert caught.value.reason is CallFailure.GENERATION_FAILED


async def test_a_refused_request_is_on_record_as_refused():
    rig = await started()

    async def refuse(request: CallRequest) -> CallReply:
        raise CallRefused("prompt_too_long", "9000 tokens, at most 8192")

    rig.worker.generate = refuse
    with pytest.raises(CallRefused, match="prompt_too_long"):
        await rig.chat(user("a"))
    (failed,) = [e for e in rig.events() if isinstance(e, CallFailed)]
    assert failed.reason is CallFailure.REFUSED


async def test_the_limit_of_calls_counts_all_that_were_admitted_and_records_none_beyond():
    rig = await started(max_calls=3)

    async def fail(request: CallRequest) -> CallReply:
        raise RuntimeError

    await rig.turns("a", "b")
    generate, rig.worker.generate = rig.worker.generate, fail
    with pytest.raises(CallFailedError):
        await rig.chat(user("c"))
    rig.worker.generate = generate
    before = rig.events()
    with pytest.raises(TooManyCalls, match="all of its 3"):
        await rig.chat(user("d"))
    assert rig.events() == before


async def test_the_limit_holds_for_calls_made_at_once():
    rig = await started(max_calls=5)
    refused = 0

    async def chat(i: int) -> None:
        nonlocal refused
        try:
            await rig.chat(user(str(i)))
        except TooManyCalls:
            refused += 1

    async with anyio.create_task_group() as tg:
        for i in range(20):
            tg.start_soon(chat, i)
    assert refused == 15
    assert sorted(e.call_id for e in rig.events() if isinstance(e, CallAdmitted)) == [f"g0.0/{i}" for i in range(5)]


ZEROS = "0" * 64
CHANGES = {
    "call_id": "g0.0/7",
    "parent_call_id": None,
    "staging_key": "g0.0/1-00000000",
    "prev_len": 3,
    "carry_len": 0,
    "delta_len": 99,
    "weight_spans": (WeightSpan(version=0, start=0, end=1),),
    "digest": ZEROS,
    "extras_digest": ZEROS,
    "chain_hash": "short",
    "cumulative_hash": ZEROS.upper() + "G",
}


@pytest.mark.parametrize("field", CHANGES)
async def test_contradictory_coordinates_fail_the_call(field):
    assert await second_reply_changed(
        lambda reply: replace(reply, coords=replace(reply.coords, **{field: CHANGES[field]}))
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda r: replace(r, prompt_tokens=r.prompt_tokens - 1),
        lambda r: replace(r, completion_tokens=r.completion_tokens + 1),
        lambda r: replace(r, finish_reason="length"),
        lambda r: replace(r, message=user("x")),
    ],
    ids=["prompt_tokens", "completion_tokens", "finish_reason", "role"],
)
async def test_a_contradictory_reply_fails_the_call(change):
    assert await second_reply_changed(change)


async def second_reply_changed(change) -> bool:
    rig = await started()
    rig.worker.generated = 4
    (first,) = await rig.turns("a")
    generate = rig.worker.generate

    async def lie(request: CallRequest) -> CallReply:
        return change(await generate(request))

    rig.worker.generate = lie
    with pytest.raises(CallFailedError) as caught:
        await rig.chat(user("a"), first.message, user("b"))
    (failed,) = [e for e in rig.events() if isinstance(e, CallFailed)]
    assert failed.detail == caught.value.detail
    return failed.reason is CallFailure.INVALID_COORDS


async def test_a_rollout_sealed_during_a_call_gets_no_answer_and_is_rejected():
    rig = await started()
    generating, go_on = anyio.Event(), anyio.Event()
    generate = rig.worker.generate

    async def slow(request: CallRequest) -> CallReply:
        generating.set()
        await go_on.wait()
        return await generate(request)

    await rig.turns("a")
    rig.worker.generate = slow

    async def late() -> None:
        with pytest.raises(RolloutClosed):
            await rig.chat(user("b"))

    async with anyio.create_task_group() as tg:
        tg.start_soon(late)
        await generating.wait()
        receipt = await rig.sealed()
        go_on.set()
    assert receipt.reason is Reason.UNSETTLED_CALL
    assert receipt.orphans == ("g0.0/1",)
    assert rig.ledger.receipt("g0.0") == receipt


async def test_a_rollout_finished_during_a_call_keeps_the_calls_own_error():
    rig = await started()
    generating = anyio.Event()

    async def hang(request: CallRequest) -> CallReply:
        generating.set()
        await anyio.sleep_forever()
        raise AssertionError

    rig.worker.generate = hang
    async with anyio.create_task_group() as tg:
        tg.start_soon(rig.chat, user("b"))
        await generating.wait()
        await rig.ledger.abort("g0.0", "gone")
        await rig.ledger.aborted("g0", "gone")
        tg.cancel_scope.cancel()
    assert rig.ledger.account.aborted == 1


async def test_parallel_conversations_of_one_rollout_do_not_mix():
    rig = await started()
    async with anyio.create_task_group() as tg:
        for text in "abc":
            tg.start_soon(rig.turns, text, text, text)
    terminals = [e.coords.call_id for e in rig.events() if isinstance(e, CallCommitted)][-3:]
    await rig.ledger.declare_terminal("g0.0", terminals[1])
    row = await rig.result()
    assert isinstance(row, VerifiedRow)
    assert row.input_ids.tolist() == rig.worker.tokens[terminals[1]]


async def test_a_call_cannot_be_committed_under_another_parent_than_it_was_admitted_with():
    rig = await started()
    (first,) = await rig.turns("a")
    admission = await rig.ledger.admit("g0.0", fingerprint([user("b")]))
    coords = replace(first.coords, call_id=admission.call_id, parent_call_id=first.coords.call_id)
    with pytest.raises(IllegalTransition, match="another parent"):
        await rig.ledger.commit(replace(first, coords=coords))
    with pytest.raises(IllegalTransition, match="committed"):
        await rig.ledger.commit(first)
