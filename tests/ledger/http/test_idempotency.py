"""A call that is made again under its idempotency key is generated once, and answered each time."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from tests.ledger.http.rig import QUESTION, ROLLOUT, HttpRig

pytestmark = pytest.mark.anyio

OTHER: Any = {"messages": [*QUESTION, *QUESTION]}


async def test_a_committed_answer_is_replayed_to_the_byte() -> None:
    async with HttpRig().running() as rig:
        first = await rig.post(Idempotency_Key="a")
        again = await rig.post(Idempotency_Key="a")
        assert first == again
        assert len(rig.worker.requests) == 1
        await rig.post(Idempotency_Key="b")
        await rig.post()
        assert len(rig.worker.requests) == 3


async def test_a_repeat_joins_the_call_that_is_running() -> None:
    async with HttpRig().running() as rig:
        release = anyio.Event()
        rig.worker.before = release.wait
        answers: list[Any] = []

        async def post() -> None:
            answers.append(await rig.post(Idempotency_Key="a"))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(post)
            while rig.server.in_flight < 3:
                await anyio.sleep(0.005)
            release.set()
        assert [status for status, _ in answers] == [200, 200, 200]
        assert len({body["id"] for _, body in answers}) == 1
        assert len(rig.worker.requests) == 1


async def test_the_call_goes_on_while_anybody_waits_and_ends_when_all_have_left() -> None:
    async with HttpRig().running() as rig:
        release = anyio.Event()
        rig.worker.before = release.wait
        leaving, _ = await rig.connect()
        data = rig.request().replace(b"Host: gate", b"Host: gate\r\nIdempotency-Key: a")
        async with anyio.create_task_group() as tasks:
            async with leaving:
                await leaving.send(data)
                while not rig.worker.running:
                    await anyio.sleep(0.005)
                tasks.start_soon(lambda: rig.post(Idempotency_Key="a"))
                while rig.server.in_flight < 2:
                    await anyio.sleep(0.005)
            while rig.server.in_flight > 1:
                await anyio.sleep(0.005)
            assert rig.worker.running == 1
            release.set()
        rig.worker.before = anyio.sleep_forever
        connection, _ = await rig.connect()
        async with connection:
            await connection.send(data.replace(b"Key: a", b"Key: b"))
            while not rig.worker.running:
                await anyio.sleep(0.005)
        await rig.idle()
        assert not rig.unsettled()
        rig.worker.before = None
        status, body = await rig.post(Idempotency_Key="b")
        assert (status, body["id"]) == (200, f"chatcmpl-{ROLLOUT}/2")


async def test_a_failed_call_is_not_replayed() -> None:
    async def fail() -> None:
        raise RuntimeError("staging failed")

    async with HttpRig().running() as rig:
        rig.worker.before = fail
        assert (await rig.post(Idempotency_Key="a"))[0] == 503
        rig.worker.before = None
        assert (await rig.post(Idempotency_Key="a"))[0] == 200


async def test_a_key_belongs_to_one_request_of_one_rollout() -> None:
    async with HttpRig().running(ROLLOUT, "g0.1") as rig:
        await rig.post(Idempotency_Key="a")
        status, body = await rig.post(body=OTHER, Idempotency_Key="a")
        assert (status, body["error"]["code"]) == (400, "idempotency_key_reused")
        status, body = await rig.post(rollout_id="g0.1", Idempotency_Key="a")
        assert (status, body["id"]) == (200, "chatcmpl-g0.1/0")
        status, body = await rig.post(Idempotency_Key="x" * 256)
        assert status == 400


async def test_answers_are_forgotten_with_their_rollout() -> None:
    async with HttpRig().running() as rig:
        await rig.post(Idempotency_Key="a")
        await rig.ledger.seal(ROLLOUT)
        assert (await rig.post(Idempotency_Key="a"))[0] == 200
        rig.server.forget(ROLLOUT)
        assert (await rig.post(Idempotency_Key="a"))[0] == 409
