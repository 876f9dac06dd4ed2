"""Nothing of an answer leaves before its commit is durable; comments keep the connection alive until then."""

from __future__ import annotations

import anyio
import openai
import pytest

from ledger.events import CallCommitted, Event, MemoryLog
from ledger.http.server import Limits
from tests.ledger.http.rig import QUESTION, HttpRig

pytestmark = pytest.mark.anyio

STREAM = {"messages": QUESTION, "stream": True}


class HoldingLog(MemoryLog):
    """Commits wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = anyio.Event()
        self.durable = anyio.Event()

    async def append(self, event: Event) -> None:
        await super().append(event)
        if isinstance(event, CallCommitted):
            self.waiting.set()
            await self.durable.wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_no_byte_of_an_answer_leaves_before_its_commit_is_durable(stream: bool) -> None:
    log = HoldingLog()
    async with HttpRig(log=log, limits=Limits(keep_alive_s=0.02)).running() as rig:
        connection, _ = await rig.connect()
        async with connection:
            rig.worker.say = "secret"
            await connection.send(rig.request(STREAM if stream else None))
            await log.waiting.wait()
            received = b""
            with anyio.move_on_after(0.2):
                while True:
                    received += await connection.receive()
            assert b"secret" not in received
            assert (b": the call is running" in received) == stream
            log.durable.set()
            while b"secret" not in received:
                received += await connection.receive()


async def test_comments_come_until_the_answer_does_and_clients_skip_them() -> None:
    async with HttpRig(limits=Limits(keep_alive_s=0.01)).running() as rig, rig.client() as client:

        async def slow() -> None:
            await anyio.sleep(0.1)

        rig.worker.before, rig.worker.say = slow, "at last"
        stream = await client.chat.completions.create(model="m", messages=QUESTION, stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "at last"


async def test_a_failure_before_the_first_comment_has_its_own_status() -> None:
    async def fail() -> None:
        raise RuntimeError("staging failed")

    async with HttpRig().running() as rig:
        rig.worker.before = fail
        status, body = await rig.post(body=STREAM)
        assert (status, body["error"]["code"]) == (503, "generation_failed")


async def test_a_failure_after_the_first_comment_ends_the_stream_with_an_error() -> None:
    async def fail() -> None:
        await anyio.sleep(0.1)
        raise RuntimeError("staging failed")

    async with HttpRig(limits=Limits(keep_alive_s=0.01)).running() as rig, rig.client() as client:
        rig.worker.before = fail
        stream = await client.chat.completions.create(model="m", messages=QUESTION, stream=True)
        with pytest.raises(openai.APIError, match="staging failed"):
            async for _ in stream:
                pass
        assert not rig.unsettled()
