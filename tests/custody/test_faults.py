"""Faults between an agent's call and its answer: the agent gets an error, the ledger says why, the rollout becomes a
placeholder with the right code, nothing is left staged, and training goes on with the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest

from dataplane.errors import DataPlaneDown
from dataplane.schema import STAGING, TRAIN
from ledger.errors import CallFailedError, CallRefused
from ledger.events import CallFailed, MemoryLog
from ledger.lineage import fingerprint
from ledger.reasons import CallFailure, Reason
from ledger.records import CallReply, CallRequest
from tests.custody.planes import FaultyPlane, late
from tests.custody.rig import SAMPLING, House, user
from tests.custody.tokenizers import saved
from workers.generation.engine import EngineDead, Generation
from workers.generation.rendering import ChatRenderer

pytestmark = pytest.mark.anyio

Fault = Callable[[House, FaultyPlane], None]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(saved(tmp_path_factory.mktemp("tokenizer"), "trims"))


def staging_fails(house: House, plane: FaultyPlane) -> None:
    plane.fail = late("put", STAGING, 1)


def data_plane_is_down(house: House, plane: FaultyPlane) -> None:
    def fail(operation: str, partition: str, keys) -> None:
        if operation == "put" and partition == STAGING:
            plane.fail = lambda *_: None
            raise DataPlaneDown("the servers are gone")

    plane.fail = fail


def engine_dies(house: House, plane: FaultyPlane) -> None:
    def spoil(call_id: str, generation: Generation) -> Generation:
        house.engine.spoil = lambda _, generation: generation
        raise EngineDead("CUDA error: an illegal memory access was encountered")

    house.engine.spoil = spoil


def worker_dies_after_staging(house: House, plane: FaultyPlane) -> None:
    """The row is there, the reply is not: the engine's process died between staging and commit."""

    def lose(request: CallRequest) -> bool:
        house.client.lose = lambda _: False
        return True

    house.client.lose = lose


def logprobs_are_nan(house: House, plane: FaultyPlane) -> None:
    once(house, lambda g: replace(g, logprobs=[float("nan")] * len(g.token_ids)))


def routes_are_malformed(house: House, plane: FaultyPlane) -> None:
    once(house, lambda g: replace(g, routed_experts="nrlre1:int16:1x1x1:AAA="))


def parents_row_is_gone(house: House, plane: FaultyPlane) -> None:
    house.client._capture._prefixes._entries.clear()
    for key in list(plane._partitions[STAGING]):
        if key.startswith("g.1/"):
            del plane._partitions[STAGING][key]


def parents_row_is_another(house: House, plane: FaultyPlane) -> None:
    house.client._capture._prefixes._entries.clear()
    for key, row in plane._partitions[STAGING].items():
        if key.startswith("g.1/"):
            row["token_ids"] = row["token_ids"] + 1


def spans_have_a_gap(house: House, plane: FaultyPlane) -> None:
    once(house, lambda g: replace(g, weight_spans=g.weight_spans[1:]))


def prompt_is_too_long(house: House, plane: FaultyPlane) -> None:
    house.engine.max_model_len = 20


def once(house: House, change: Callable[[Generation], Generation]) -> None:
    def spoil(call_id: str, generation: Generation) -> Generation:
        house.engine.spoil = lambda _, generation: generation
        return change(generation)

    house.engine.spoil = spoil


FAULTS: list[tuple[Fault, CallFailure, Reason | None]] = [
    (staging_fails, CallFailure.STAGING_FAILED, Reason.CALL_FAILED),
    (data_plane_is_down, CallFailure.STAGING_FAILED, Reason.CALL_FAILED),
    (engine_dies, CallFailure.GENERATION_FAILED, Reason.CALL_FAILED),
    (worker_dies_after_staging, CallFailure.GENERATION_FAILED, Reason.CALL_FAILED),
    (logprobs_are_nan, CallFailure.CAPTURE_FAILED, Reason.CALL_FAILED),
    (routes_are_malformed, CallFailure.CAPTURE_FAILED, Reason.CALL_FAILED),
    (parents_row_is_gone, CallFailure.CAPTURE_FAILED, Reason.CALL_FAILED),
    (parents_row_is_another, CallFailure.CAPTURE_FAILED, Reason.CALL_FAILED),
    (spans_have_a_gap, CallFailure.INVALID_COORDS, Reason.CALL_FAILED),
    (prompt_is_too_long, CallFailure.REFUSED, None),
]


@pytest.mark.parametrize(("fault", "failure", "reason"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
async def test_a_fault_in_a_call(
    renderer: ChatRenderer, fault: Fault, failure: CallFailure, reason: Reason | None
) -> None:
    plane = FaultyPlane()
    house = House(Path(), renderer=renderer, plane=plane, call_attempts=1)
    errors: list[Exception] = []

    async def healthy(rollout_id: str) -> None:
        await house.turns(rollout_id, "ab", "ok")

    async def struck(rollout_id: str) -> None:
        (first,) = await house.turns(rollout_id, "ab")
        fault(house, plane)
        with pytest.raises((CallFailedError, CallRefused)) as error:
            await house.chat(rollout_id, user("ab"), first.message, user("on " * 10))
        errors.append(error.value)
        house.engine.max_model_len = 100_000
        house.bring_back()

    await house.play("g", healthy, struck, healthy)
    await house.finalize()

    (error,) = errors
    assert isinstance(error, CallRefused if failure is CallFailure.REFUSED else CallFailedError)
    assert isinstance(house.log, MemoryLog)
    (failed,) = [event for event in house.log.events if isinstance(event, CallFailed)]
    assert (failed.call_id, failed.reason) == ("g.1/1", failure)
    assert failed.detail
    samples = house.samples()
    assert {r: s.reason for r, s in samples.items()} == {"g.0": None, "g.1": reason, "g.2": None}
    assert await plane.keys(STAGING) == []
    await house.train()
    assert sorted(row.key for row in house.trainer.rows) == [r for r, s in samples.items() if s.valid]
    assert await plane.keys(TRAIN) == []
    account = house.ledger.account
    assert (account.dispatched, account.ended, account.lost, account.duplicated) == (3, 3, 0, 0)


@pytest.mark.parametrize("declared", [False, True])
async def test_an_agent_that_goes_on_after_a_fault_is_trained_on_what_it_got(renderer: ChatRenderer, declared: bool):
    """The lost answer's row was staged: it is an orphan, cleared and never trained."""
    plane = FaultyPlane()
    house = House(Path(), renderer=renderer, plane=plane)

    async def retries(rollout_id: str) -> None:
        (first,) = await house.turns(rollout_id, "ab")
        worker_dies_after_staging(house, plane)
        conversation = (user("ab"), first.message, user("on"))
        with pytest.raises(CallFailedError):
            await house.chat(rollout_id, *conversation)
        assert len(await plane.keys(STAGING)) == 2
        again = await house.chat(rollout_id, *conversation)
        if declared:
            await house.ledger.declare_terminal(rollout_id, again.coords.call_id)

    await house.play("g", retries)
    await house.finalize()
    (sample,) = house.samples().values()
    (row,) = await house.rows(sample)
    assert row["input_ids"].tolist() == house.engine.conversation("g.0/2")
    assert house.finalizers.take_counts()["orphans_cleared"] == 1
    assert await plane.keys(STAGING) == []


async def test_a_call_that_takes_too_long_fails_and_its_late_row_is_cleared(renderer: ChatRenderer):
    plane = FaultyPlane()
    house = House(Path(), renderer=renderer, plane=plane, call_timeout_s=0.2, late_after_s=0.0)
    generate, released, staged = house.engine.generate, anyio.Event(), anyio.Event()

    async def slow(*args, **kwargs) -> Generation:
        """As an engine does that only hears of the cancellation when it is done."""
        with anyio.CancelScope(shield=True):
            await released.wait()
            return await generate(*args, **kwargs)

    class Stubborn(type(house.client)):
        async def call(self, method, request, *, timeout=None):
            with anyio.CancelScope(shield=True):
                try:
                    return await super().call(method, request, timeout=timeout)
                finally:
                    staged.set()

    async with anyio.create_task_group() as tg:
        background = tg

        async def abandoned(request: CallRequest) -> CallReply:
            """The caller's deadline ends its wait; the worker goes on in the background."""
            background.start_soon(Stubborn(house.client._capture).call, None, request)
            await anyio.sleep_forever()
            raise AssertionError

        house.engine.generate = slow  # type: ignore[method-assign]
        house.pool.generate = abandoned  # type: ignore[method-assign]

        async def times_out(rollout_id: str) -> None:
            with pytest.raises(CallFailedError) as error:
                await house.chat(rollout_id, user("ab"))
            assert error.value.reason is CallFailure.TIMEOUT

        await house.play("g", times_out)
        del house.pool.generate
        house.engine.generate = generate  # type: ignore[method-assign]

        async def healthy(rollout_id: str) -> None:
            released.set()
            await staged.wait()
            await house.turns(rollout_id, "ab")

        await house.play("h", healthy)
    assert len(await plane.keys(STAGING)) == 2
    await house.finalize()
    assert house.finalizers.rejections == {Reason.CALL_FAILED: 1}
    assert await plane.keys(STAGING) == []


async def test_a_cancelled_call_fails_and_its_rollout_is_a_placeholder(renderer: ChatRenderer):
    house = House(Path(), renderer=renderer)

    async def impatient(rollout_id: str) -> None:
        (first,) = await house.turns(rollout_id, "ab")
        with anyio.CancelScope() as scope:
            scope.cancel()
            await house.chat(rollout_id, user("ab"), first.message, user("on"))

    async def healthy(rollout_id: str) -> None:
        await house.turns(rollout_id, "ab")

    await house.play("g", impatient, healthy)
    await house.finalize()
    assert isinstance(house.log, MemoryLog)
    (failed,) = [event for event in house.log.events if isinstance(event, CallFailed)]
    assert failed.reason is CallFailure.CANCELLED
    assert {r: s.reason for r, s in house.samples().items()} == {"g.0": Reason.CALL_FAILED, "g.1": None}


async def test_a_call_without_an_outcome_is_never_trained_as_a_shorter_rollout(renderer: ChatRenderer):
    """The controller lost track of a call: admitted, staged even, and no word of it."""
    house = House(Path(), renderer=renderer)
    (rollout_id,) = await house.dispatch("g", 1)
    (first,) = await house.turns(rollout_id, "ab")

    conversation = (user("ab"), first.message, user("on"))
    admission = await house.ledger.admit(rollout_id, fingerprint(conversation))
    request = CallRequest(
        rollout_id=rollout_id,
        call_id=admission.call_id,
        messages=conversation,
        sampling=msgspec.structs.replace(SAMPLING, seed=1),
        parent=admission.parent,
    )
    await house.pool.generate(request)
    await house.end("g", [rollout_id])
    await house.finalize()
    assert house.finalizers.rejections == {Reason.UNSETTLED_CALL: 1}
    assert await house.plane.keys(STAGING) == []


@pytest.mark.parametrize("column", ["token_ids", "token_mask", "logprobs", "weight_versions"])
async def test_a_staged_row_that_was_altered_is_never_trained(renderer: ChatRenderer, column: str):
    plane = FaultyPlane()
    house = House(Path(), renderer=renderer, plane=plane)

    async def healthy(rollout_id: str) -> None:
        await house.turns(rollout_id, "ab", "ok")

    await house.play("g", healthy, healthy)
    key = next(key for key in plane._partitions[STAGING] if key.startswith("g.1/1"))
    plane._partitions[STAGING][key][column][-1] += np.float32(-0.5) if column == "logprobs" else 1
    await house.finalize()
    samples = house.samples()
    assert samples["g.0"].valid
    assert not samples["g.1"].valid
    assert samples["g.1"].reason in set(Reason)
