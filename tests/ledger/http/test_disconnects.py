"""However a connection ends or stalls, its calls are settled, nothing stays in the engine, and no other client notices."""

from __future__ import annotations

import random
import socket
import struct
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream

from ledger.errors import JournalFailed
from ledger.events import CallAdmitted, CallCommitted
from ledger.http.server import Limits
from ledger.records import Message
from tests.ledger.http.rig import QUESTION, ROLLOUT, HttpRig

pytestmark = pytest.mark.anyio


def reset(raw: socket.socket) -> None:
    """Have the connection end with a reset instead of an orderly close."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def closed(stream: SocketStream) -> None:
    """Wait until the other side has closed."""
    try:
        while True:
            await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return


async def test_connections_that_break_at_random_points_leave_every_call_settled() -> None:
    rng = random.Random(11)
    async with HttpRig(limits=Limits(keep_alive_s=0.01)).running() as rig:

        async def some_time() -> None:
            await anyio.sleep(rng.random() * 0.02)

        rig.worker.before = some_time

        async def agent() -> None:
            for _ in range(10):
                stream, raw = await rig.connect()
                body = {"messages": QUESTION, "stream": rng.random() < 0.5}
                data = rig.request(body)
                if rng.random() < 0.3:
                    data = data.replace(b"Host: gate", f"Host: gate\r\nIdempotency-Key: {rng.randrange(5)}".encode())
                if rng.random() < 0.3:
                    data = data[: rng.randrange(len(data))]
                if rng.random() < 0.2:
                    data *= 3
                async with stream:
                    await stream.send(data)
                    with anyio.move_on_after(rng.random() * 0.03):
                        await stream.receive()
                    if rng.random() < 0.5:
                        reset(raw)

        async with anyio.create_task_group() as tasks:
            for _ in range(12):
                tasks.start_soon(agent)
        await rig.idle()
        assert not rig.unsettled()
        assert {failure.reason for failure in rig.failures()} == {"cancelled"}
        assert rig.commits()
        rig.worker.before = None
        assert (await rig.post())[0] == 200


async def test_a_client_that_stops_reading_is_cut_off_and_its_call_stays_committed() -> None:
    async with HttpRig(limits=Limits(send_timeout_s=0.5)).running() as rig:
        rig.worker.message = Message(role="assistant", content="x" * 16_000_000)
        stream, raw = await rig.connect()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with stream:
            await stream.send(rig.request())
            while not rig.commits():
                await anyio.sleep(0.01)
            await rig.idle()
            while rig.server.connections:
                await anyio.sleep(0.01)
        assert not rig.unsettled()
        rig.worker.message = None
        assert (await rig.post())[0] == 200


@pytest.mark.parametrize("sent", [b"", b"POST /ng-rollout/", b"GET / HTTP/1.1\r\nHost: x\r\nA: "])
async def test_headers_that_never_end_are_given_up(sent: bytes) -> None:
    async with HttpRig(limits=Limits(idle_timeout_s=0.2)).running() as rig:
        stream, _ = await rig.connect()
        async with stream:
            if sent:
                await stream.send(sent)
            await closed(stream)


async def test_a_body_that_trickles_in_is_given_up() -> None:
    async with HttpRig(limits=Limits(read_timeout_s=0.2)).running() as rig:
        stream, _ = await rig.connect()
        async with stream, anyio.create_task_group() as tasks:
            data = rig.request()
            await stream.send(data[:-20])

            async def trickle() -> None:
                for byte in data[-20:-1]:
                    await anyio.sleep(0.05)
                    await stream.send(bytes([byte]))

            tasks.start_soon(trickle)
            assert b"408" in (await stream.receive()).split(b"\r\n")[0]
            tasks.cancel_scope.cancel()
        assert not rig.worker.requests


async def test_beyond_the_limit_those_who_ask_nothing_are_closed_first() -> None:
    async with HttpRig(limits=Limits(max_connections=3)).running() as rig, AsyncExitStack() as streams:

        async def connected(*, asks: bool) -> SocketStream:
            stream = await streams.enter_async_context((await rig.connect())[0])
            if asks:
                await served(stream)
            return stream

        async def served(stream: SocketStream) -> None:
            await stream.send(rig.request())
            assert (await stream.receive()).startswith(b"HTTP/1.1 200")

        user = await connected(asks=True)
        hoarded = [await connected(asks=False) for _ in range(2)]
        for silent in hoarded:
            newer = await connected(asks=True)
            await closed(silent)
        await served(user)
        await served(newer)


async def test_beyond_the_limit_calls_that_run_are_not_disturbed() -> None:
    async with HttpRig(limits=Limits(max_connections=2)).running() as rig, anyio.create_task_group() as tasks:
        release = anyio.Event()
        rig.worker.before = release.wait
        for _ in range(2):
            tasks.start_soon(rig.post)
        while rig.worker.running < 2:
            await anyio.sleep(0.005)
        extra, _ = await rig.connect()
        async with extra:
            await closed(extra)
        release.set()
    assert len(rig.commits()) == 2


async def test_the_end_of_the_server_settles_what_runs_and_says_so() -> None:
    rig = HttpRig()
    async with rig.running():
        rig.worker.before = anyio.sleep_forever
        stream, _ = await rig.connect()
        await stream.send(rig.request())
        while not rig.worker.running:
            await anyio.sleep(0.005)
    assert not rig.unsettled()
    assert rig.worker.running == rig.server.in_flight == 0
    async with stream:
        answer = await stream.receive()
        assert answer.startswith(b"HTTP/1.1 503")
        await closed(stream)
    with pytest.raises(OSError):
        await rig.connect()


@pytest.mark.parametrize("when", [CallAdmitted, CallCommitted])
@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), JournalFailed(Path("ledger"), "No space left on device")]
)
async def test_a_ledger_that_fails_ends_the_server_with_its_error(failure: Exception, when: type) -> None:
    rig = HttpRig()

    async def broken(event: object) -> None:
        if isinstance(event, when):
            raise failure

    async def call_with_a_broken_ledger() -> None:
        async with rig.running():
            rig.log.append = broken
            status, body = await rig.post()
            assert (status, body["error"]["code"]) == (503, "ledger_failed")
            await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup) as raised:
        await call_with_a_broken_ledger()
    assert raised.group_contains(type(failure), match="No space left")


async def test_a_call_of_a_sealed_rollout_that_is_still_running_is_not_delivered() -> None:
    async with HttpRig().running() as rig:
        rig.worker.before = anyio.sleep_forever
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.post)
            while not rig.worker.running:
                await anyio.sleep(0.005)
            receipt = await rig.ledger.seal(ROLLOUT)
            assert receipt.reason == "unsettled_call"
            tasks.cancel_scope.cancel()
        await rig.idle()
