"""Random bytes on the wire: the server goes on serving, the client ends in an `RpcError`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
from anyio.abc import SocketStream
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.rpc.kit import ECHO, TOKEN, Text, answers, other_end, pair, request_bytes, says
from workers.rpc.client import RpcClient
from workers.rpc.errors import RpcError

HEADER = st.text(st.characters(codec="latin-1", exclude_characters="\r\n\x00"), max_size=40)
REQUESTS = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=300).map(lambda body: request_bytes("/rpc/echo", body)),
    st.builds(
        lambda path, id_, deadline, body: request_bytes(f"/rpc/{path}", body, X_Request_Id=id_, X_Deadline_Ms=deadline),
        HEADER,
        HEADER,
        HEADER,
        st.binary(max_size=50),
    ),
)


@given(st.lists(REQUESTS, min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_no_bytes_stop_the_server(requests: list[bytes]) -> None:
    async def run() -> None:
        async with pair() as (address, client):
            for request in requests:
                async with await anyio.connect_unix(address.removeprefix("unix:")) as stream:
                    await stream.send(request)
            assert await client.call(ECHO, Text("still here")) == Text("still here")

    anyio.run(run)


REPLIES = st.one_of(
    st.binary(max_size=300).map(says),
    st.builds(
        lambda status, body: answers(b"HTTP/1.1 %d X" % status, body),
        st.sampled_from((200, 400, 401, 404, 500, 503, 504)),
        st.binary(max_size=100),
    ),
)


@given(REPLIES)
@settings(max_examples=80, deadline=None)
def test_no_reply_but_an_echo_gets_through(handle: Callable[[SocketStream], Awaitable[None]]) -> None:
    async def run() -> None:
        with anyio.fail_after(30):
            async with other_end(handle) as address, RpcClient(address, TOKEN, name="w0") as client:
                with suppress(RpcError):
                    assert isinstance(await client.call(ECHO, Text("hi"), timeout=0.5), Text)

    anyio.run(run)
