"""Client and server over real sockets."""

from __future__ import annotations

import logging

import anyio
import msgspec
import pytest

from tests.workers.rpc.kit import (
    ECHO,
    HANG,
    TOKEN,
    Attempt,
    Gate,
    Hanging,
    Text,
    echo,
    exchange,
    pair,
    request_bytes,
    serving,
    socket_path,
)
from workers.rpc import wire
from workers.rpc.client import RpcClient
from workers.rpc.errors import Failure, HandlerError, ProtocolError, RemoteError, RpcTimeout, WorkerUnreachable
from workers.rpc.method import Empty, Method
from workers.rpc.server import RpcServer

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


async def test_a_call_returns_the_typed_reply() -> None:
    async with pair() as (_, client):
        assert await client.call(ECHO, Text("hi")) == Text("hi")


@pytest.mark.parametrize("address", ["tcp:127.0.0.1:0", "tcp:::1:0"])
async def test_tcp_serves_on_the_port_it_reports(address: str) -> None:
    server = RpcServer("w0")
    server.register(ECHO, echo)
    async with serving(server, address) as bound, RpcClient(bound, TOKEN, name="w0") as client:
        assert not bound.endswith(":0")
        assert await client.call(ECHO, Text("hi")) == Text("hi")


@pytest.mark.parametrize("address", ["unix:relative", "tcp:host", "tcp::1", "tcp:h:70000", "http://h:1", ""])
def test_an_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="neither unix"):
        RpcClient(address, TOKEN, name="w0")


async def test_health_tells_who_serves_and_what_runs() -> None:
    hanging = Hanging()
    async with pair((HANG, hanging)) as (_, client), anyio.create_task_group() as tasks:
        tasks.start_soon(client.call, HANG, Empty())
        await hanging.begun.wait()
        health = await client.health()
        assert (health.name, health.in_flight) == ("w0", 1)
        tasks.cancel_scope.cancel()


async def test_five_hundred_calls_run_at_once() -> None:
    everyone_is_here = anyio.Event()
    present = 0

    async def meet(request: Text) -> Text:
        nonlocal present
        present += 1
        if present == 500:
            everyone_is_here.set()
        await everyone_is_here.wait()
        return request

    meeting = Method("meet", Text, Text, timeout_s=30.0)
    replies: set[str] = set()

    async def attend(client: RpcClient, text: str) -> None:
        replies.add((await client.call(meeting, Text(text))).text)

    async with pair((meeting, meet)) as (_, client):
        async with anyio.create_task_group() as tasks:
            for i in range(500):
                tasks.start_soon(attend, client, str(i))
        assert len(replies) == 500
        assert (await client.health()).in_flight == 0


async def test_cancelling_the_caller_cancels_the_handler() -> None:
    hanging = Hanging()
    async with pair((HANG, hanging)) as (_, client):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call, HANG, Empty())
            await hanging.begun.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(10):
            await hanging.cancelled.wait()
        assert (await client.health()).in_flight == 0


async def test_the_client_keeps_the_deadline_and_the_handler_is_cancelled() -> None:
    hanging = Hanging()
    async with pair((HANG, hanging)) as (_, client):
        with anyio.fail_after(10), pytest.raises(RpcTimeout, match=r"w0: no reply to hang within 0\.2 s"):
            await client.call(HANG, Empty(), timeout=0.2)
        with anyio.fail_after(10):
            await hanging.cancelled.wait()


async def test_the_server_keeps_the_deadline_of_a_caller_that_stays() -> None:
    hanging = Hanging()
    async with pair((HANG, hanging)) as (address, _):
        with anyio.fail_after(10):
            status, body = await exchange(
                address, request_bytes("/rpc/hang", wire.encode(Empty()), X_Deadline_Ms="200")
            )
            await hanging.cancelled.wait()
        assert status == wire.Status.DEADLINE
        assert wire.decode(Failure, body).kind == "deadline"


async def test_a_request_body_that_never_comes_ends_at_the_deadline() -> None:
    async with pair() as (address, _):
        request = request_bytes("/rpc/echo", b"x" * 100, X_Deadline_Ms="200")[:-50]
        with anyio.fail_after(10):
            status, _ = await exchange(address, request)
        assert status == wire.Status.DEADLINE


async def test_a_repeat_joins_the_running_handler_and_later_gets_the_kept_reply() -> None:
    gate = Gate()
    method = Method("gate", Text, Text, timeout_s=20.0)
    replies: list[tuple[int, bytes]] = []
    async with pair((method, gate)) as (address, _):
        request = request_bytes("/rpc/gate", wire.encode(Text("once")))

        async def ask() -> None:
            replies.append(await exchange(address, request))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await gate.begun.wait()
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            gate.open.set()
        await ask()
        assert gate.runs == 1
        assert replies == [(200, wire.encode(Text("once")))] * 3


async def test_an_id_used_for_another_request_is_refused() -> None:
    async with pair() as (address, _):
        assert (await exchange(address, request_bytes("/rpc/echo", wire.encode(Text("a")))))[0] == 200
        status, body = await exchange(address, request_bytes("/rpc/echo", wire.encode(Text("b"))))
        assert (status, wire.decode(Failure, body).kind) == (wire.Status.BAD_MESSAGE, "bad_message")


async def test_a_token_that_is_wrong_or_missing_is_refused() -> None:
    async with pair() as (address, _):
        for token in ("the-tokem", "", "\u00fc"):
            async with RpcClient(address, token, name="w0") as client:
                with pytest.raises(RemoteError) as caught:
                    await client.call(ECHO, Text("hi"))
                assert (caught.value.failure.kind, caught.value.failure.where) == ("unauthorized", "w0.echo")
                with pytest.raises(RemoteError):
                    await client.health()


async def test_a_request_above_the_limit_is_refused_on_both_sides() -> None:
    async with pair(max_bytes=1000, client_max_bytes=2000) as (_, client):
        with pytest.raises(ProtocolError, match="the request has 3003 bytes; at most 2000"):
            await client.call(ECHO, Text("x" * 2994))
        with pytest.raises(ProtocolError, match="the request has 1509 bytes or more; at most 1000"):
            await client.call(ECHO, Text("x" * 1500))
        assert await client.call(ECHO, Text("x" * 900)) == Text("x" * 900)


async def test_a_chunked_request_above_the_limit_is_refused() -> None:
    async with pair(max_bytes=1000) as (address, _):
        head = request_bytes("/rpc/echo", Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"")
        status, body = await exchange(address, head + b"7d0\r\n" + b"x" * 2000 + b"\r\n0\r\n\r\n")
        assert (status, wire.decode(Failure, body).kind) == (wire.Status.BAD_MESSAGE, "bad_message")


GROW = Method("grow", Text, Text, timeout_s=20.0)


async def grow(request: Text) -> Text:
    return Text(request.text * 1000)


@pytest.mark.parametrize(("server_limit", "client_limit"), [(1000, 2**20), (2**20, 1000)])
async def test_a_reply_above_the_limit_is_refused_on_both_sides(server_limit: int, client_limit: int) -> None:
    async with pair((GROW, grow), max_bytes=server_limit, client_max_bytes=client_limit) as (_, client):
        with pytest.raises(ProtocolError, match="reply has"):
            await client.call(GROW, Text("abc"))
        assert await client.call(ECHO, Text("still here")) == Text("still here")


async def test_messages_of_several_megabytes_pass_below_the_limit() -> None:
    async with pair(max_bytes=2**22) as (_, client):
        large = Text("x" * (2**22 - 100))
        assert await client.call(ECHO, large) == large


async def test_a_handler_error_arrives_as_its_failure() -> None:
    async def fail(request: Text) -> Text:
        raise HandlerError("prompt_too_long", "5000 tokens, at most 4096", failure_class="data")

    async def fail_in_task_group(request: Text) -> Text:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail, request)
        return request

    methods = [Method(name, Text, Text, timeout_s=20.0) for name in ("direct", "grouped")]
    async with pair((methods[0], fail), (methods[1], fail_in_task_group)) as (_, client):
        for method in methods:
            with pytest.raises(RemoteError) as caught:
                await client.call(method, Text("hi"))
            assert caught.value.failure == Failure(
                kind="prompt_too_long",
                message="5000 tokens, at most 4096",
                failure_class="data",
                where=f"w0.{method.name}",
            )


async def test_another_exception_arrives_as_its_name_and_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(request: Text) -> Text:
        raise LookupError("x" * 100_000)

    method = Method("fail", Text, Text, timeout_s=20.0)
    async with pair((method, fail)) as (_, client):
        with pytest.raises(RemoteError, match=r"w0\.fail: LookupError: xxx") as caught:
            await client.call(method, Text("hi"))
        assert len(caught.value.failure.message) == 4000
        assert await client.call(ECHO, Text("still here")) == Text("still here")
    assert "Traceback" in caplog.text
    assert "LookupError" in caplog.text


async def test_a_handler_that_returns_another_type_fails() -> None:
    async def confused(request: Text) -> Empty:
        return Empty()

    method = Method("confused", Text, Text, timeout_s=20.0)
    async with pair((method, confused)) as (_, client):
        with pytest.raises(RemoteError, match="TypeError: handler returned Empty, not Text"):
            await client.call(method, Text("hi"))


async def test_a_request_of_another_shape_is_refused_with_the_path_of_the_fault() -> None:
    class Wrong(msgspec.Struct):
        text: int

    async with pair() as (_, client):
        with pytest.raises(
            ProtocolError, match=r"w0: echo: not a valid request: Expected `str`, got `int` - at `\$.text`"
        ):
            await client.call(Method("echo", Wrong, Text, timeout_s=20.0), Wrong(3))


async def test_a_reply_of_another_shape_is_refused_with_the_path_of_the_fault() -> None:
    class Wrong(msgspec.Struct):
        text: int

    async with pair() as (_, client):
        with pytest.raises(ProtocolError, match=r"w0: echo: the reply is not a Wrong: .* - at `\$.text`"):
            await client.call(Method("echo", Text, Wrong, timeout_s=20.0), Text("hi"))


async def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    async with pair() as (_, client):
        with pytest.raises(ProtocolError, match="POST '/rpc/nope' is not a method; this worker has: echo"):
            await client.call(Method("nope", Text, Text, timeout_s=20.0), Text("hi"))


@pytest.mark.parametrize(
    "request_",
    [
        request_bytes("/rpc/echo", X_Request_Id=""),
        request_bytes("/rpc/echo", X_Request_Id="x" * 65),
        request_bytes("/rpc/echo", X_Request_Id="a b"),
        request_bytes("/rpc/echo", X_Deadline_Ms=""),
        request_bytes("/rpc/echo", X_Deadline_Ms="-5"),
        request_bytes("/rpc/echo", X_Deadline_Ms="1e3"),
        request_bytes("/rpc/echo", X_Deadline_Ms="9" * 5000),
        request_bytes("/rpc/echo", b"\xc1"),
        request_bytes("/rpc/echo", b"\x91" * 100_000),
        request_bytes("/rpc/echo", verb="PUT"),
        request_bytes("/echo"),
        request_bytes("/rpc/%0d%0aX:%20y"),
        request_bytes("/rpc/\udcff".encode(errors="surrogateescape").decode("latin-1")),
        request_bytes("/"),
        b"\x16\x03\x01 not http\r\n\r\nContent-Length: 0",
    ],
)
async def test_a_malformed_request_is_refused(request_: bytes) -> None:
    async with pair() as (address, client):
        assert (await exchange(address, request_))[0] == 400
        assert await client.call(ECHO, Text("still here")) == Text("still here")


async def test_a_method_is_registered_once() -> None:
    server = RpcServer("w0")
    server.register(ECHO, echo)
    with pytest.raises(ValueError, match="'echo' is registered already"):
        server.register(ECHO, echo)


async def test_a_stopping_server_cancels_its_handlers_and_tells_their_callers() -> None:
    cleaned = anyio.Event()
    begun = anyio.Event()

    async def slow_to_leave(request: Empty) -> Empty:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.1)
                cleaned.set()
        return request

    server = RpcServer("w0")
    server.register(HANG, slow_to_leave)

    async with (
        socket_path() as path,
        RpcClient(f"unix:{path}", TOKEN, name="w0") as client,
        anyio.create_task_group() as tasks,
    ):
        async with serving(server, f"unix:{path}"):
            attempt = Attempt(tasks, client.call, HANG, Empty())
            await begun.wait()
        assert cleaned.is_set()
        outcome = await attempt.outcome()
        assert isinstance(outcome, WorkerUnreachable)
        assert "stopping" in str(outcome)


async def test_an_address_that_cannot_be_bound_is_an_os_error() -> None:
    with pytest.raises(OSError, match=r"/nonexistent/s|No such file"):
        await RpcServer("w0").serve("unix:/nonexistent/s", TOKEN)


async def test_a_handler_that_awaits_something_cancelled_leaves_the_server_serving() -> None:
    async def strange(request: Text) -> Text:
        raise anyio.get_cancelled_exc_class()

    method = Method("strange", Text, Text, timeout_s=20.0)
    async with pair((method, strange)) as (_, client):
        with pytest.raises(RemoteError, match="cancelled"):
            await client.call(method, Text("hi"))
        assert await client.call(ECHO, Text("still here")) == Text("still here")


async def test_an_exception_that_cannot_be_put_into_words_leaves_the_server_serving(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    async def fail(request: Text) -> Text:
        raise Unspeakable

    method = Method("fail", Text, Text, timeout_s=20.0)
    async with pair((method, fail)) as (_, client):
        with pytest.raises(RemoteError, match=r"w0\.fail: ValueError: the worker's log has the traceback"):
            await client.call(method, Text("hi"))
        assert await client.call(ECHO, Text("still here")) == Text("still here")
    assert "no words" in caplog.text


async def test_text_that_is_not_unicode_is_refused_or_escaped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="workers.rpc")  # a report with such text cannot be sent by pytest-xdist

    async def fail(request: Text) -> Text:
        raise OSError("no file \udcff")

    async def reply(request: Text) -> Text:
        return Text("\udcff")

    methods = [Method(name, Text, Text, timeout_s=20.0) for name in ("fail", "reply")]
    async with pair((methods[0], fail), (methods[1], reply)) as (_, client):
        with pytest.raises(ProtocolError, match="the request cannot be encoded"):
            await client.call(ECHO, Text("\udcff"))
        with pytest.raises(RemoteError, match=r"no file \\udcff"):
            await client.call(methods[0], Text("hi"))
        with pytest.raises(RemoteError, match="UnicodeEncodeError"):
            await client.call(methods[1], Text("hi"))
