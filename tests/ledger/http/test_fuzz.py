"""Whatever comes over the socket is answered, never with a 500 and never with silence, and leaves nothing behind."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.http.bodies import ChatBody, ChatMessage, CompletionBody
from ledger.http.server import Limits
from tests.ledger.http.rig import ROLLOUT, HttpRig

HANG_GUARD_S = 20.0
Exchange = Callable[[bytes], bytes]

TEXT = st.text(max_size=20)
NAMES = st.sampled_from(sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, "unknown"}))
NUMBERS = st.one_of(
    st.integers(),
    st.integers(-2, 3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([2**63, -(2**64)]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "critic"]), "content": TEXT}
        ),
        st.dictionaries(st.sampled_from(ChatMessage.__struct_fields__), VALUES, max_size=4),
    ),
    max_size=3,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.fixed_dictionaries({"name": TEXT, "parameters": VALUES})}
    ),
    max_size=2,
)
BODIES = st.one_of(
    st.dictionaries(NAMES, VALUES, max_size=6),
    st.builds(
        lambda messages, tools, more: {"messages": messages, "tools": tools, **more},
        MESSAGES,
        TOOLS,
        st.dictionaries(NAMES.filter(lambda n: n not in ("messages", "tools")), VALUES, max_size=2),
    ),
    st.builds(lambda prompt, logprobs: {"prompt": prompt, "logprobs": logprobs}, VALUES, VALUES),
    VALUES,
)


@pytest.fixture(scope="module")
def rig() -> Iterator[HttpRig]:
    with start_blocking_portal() as portal:

        async def make() -> HttpRig:
            return HttpRig(
                limits=Limits(read_timeout_s=1.0, idle_timeout_s=2.0, max_body_bytes=20_000), max_calls=10**9
            )

        made = portal.call(make)
        with portal.wrap_async_context_manager(made.running()):
            yield made
            portal.call(made.idle)
            assert not made.unsettled()


def exchange(rig: HttpRig, request: bytes) -> bytes:
    """All that the server answers to these bytes, up to its end of the connection."""
    with closing(socket.create_connection(("127.0.0.1", rig.port), timeout=HANG_GUARD_S)) as connection:
        answer = b""
        try:
            connection.sendall(request)
            while part := connection.recv(65536):
                answer += part
        except ConnectionError:
            pass  # Broken off while it still sent.
        return answer


def ask(rig: HttpRig, method: str, path: str, body: bytes, key: str = "") -> tuple[int, Any]:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: gate\r\nConnection: close\r\n"
        f"Authorization: Bearer {key or rig.server.api_key(ROLLOUT)}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    head, _, answer = exchange(rig, head.encode(errors="surrogatepass") + body).partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), answer


def acceptable(status: int, answer: bytes) -> None:
    assert status in (200, 400), answer
    if status == 400:
        error = json.loads(answer)["error"]
        assert error["message"]
        assert error["code"]


@settings(max_examples=300)
@given(body=BODIES, path=st.sampled_from(["chat/completions", "completions"]))
def test_any_json_is_answered_or_refused_in_openai_s_shape(rig: HttpRig, body: Any, path: str) -> None:
    acceptable(*ask(rig, "POST", f"/ng-rollout/{ROLLOUT}/v1/{path}", json.dumps(body).encode()))


@settings(max_examples=150)
@given(body=st.binary(max_size=200), path=st.sampled_from(["chat/completions", "completions"]))
def test_any_bytes_as_a_body_are_refused(rig: HttpRig, body: bytes, path: str) -> None:
    acceptable(*ask(rig, "POST", f"/ng-rollout/{ROLLOUT}/v1/{path}", body))


@pytest.mark.parametrize("text", ["\\ud800", "\\udc00 x", "a\\ud83d", "\\u0000"])
def test_text_that_is_no_text_is_refused_or_taken(rig: HttpRig, text: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "{text} tail"}}]}}'.encode()
    acceptable(*ask(rig, "POST", f"/ng-rollout/{ROLLOUT}/v1/chat/completions", body))


SEGMENT = st.one_of(
    st.sampled_from(
        [
            "ng-rollout",
            ROLLOUT,
            "v1",
            "chat",
            "completions",
            "models",
            "control",
            "rollouts",
            "manifest",
            "seal",
            "",
            "..",
        ]
    ),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=10),
)


@settings(max_examples=200)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"]),
    path=st.lists(SEGMENT, max_size=6).map(lambda parts: "/" + "/".join(parts)),
    key=st.sampled_from(["", "wrong"]),
)
def test_any_path_is_answered(rig: HttpRig, method: str, path: str, key: str) -> None:
    status, _ = ask(rig, method, path, b"{}", key)
    assert 200 <= status < 500


@settings(max_examples=100)
@given(
    request=st.one_of(
        st.binary(max_size=300), st.text(max_size=100).map(lambda t: f"POST / HTTP/1.1\r\n{t}\r\n\r\n".encode())
    )
)
def test_bytes_that_are_no_http_end_in_an_answer_or_a_closed_connection(rig: HttpRig, request: bytes) -> None:
    with closing(socket.create_connection(("127.0.0.1", rig.port), timeout=HANG_GUARD_S)) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
        except ConnectionError:
            return
        assert not answer.startswith(b"HTTP/1.1 5")


def test_a_call_still_works_after_all_of_that(rig: HttpRig) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    status, answer = ask(rig, "POST", f"/ng-rollout/{ROLLOUT}/v1/chat/completions", body)
    assert status == 200
    assert json.loads(answer)["choices"][0]["message"]["content"]
