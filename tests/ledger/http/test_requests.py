"""Requests that no OpenAI client sends: no HTTP at all, or HTTP of a kind that is seldom seen."""

from __future__ import annotations

import json
import logging

import anyio
import pytest

from tests.ledger.http.rig import QUESTION, ROLLOUT, HttpRig

pytestmark = pytest.mark.anyio

POST = f"POST /ng-rollout/{ROLLOUT}/v1/chat/completions HTTP/1.1\r\nHost: gate\r\n".encode()


async def exchange(rig: HttpRig, request: bytes) -> tuple[int, str, dict]:
    """Status, headers and decoded body of the answer, after which the connection must be closed."""
    stream, _ = await rig.connect()
    async with stream:
        await stream.send(request)
        answer = b""
        try:
            while True:
                answer += await stream.receive()
        except anyio.EndOfStream:
            pass
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode(), json.loads(body)


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9,
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        POST + b"X: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: gate\r\n\r\n",
    ],
    ids=["TLS", "negative length", "two lengths", "no chunk", "long header", "long path"],
)
async def test_what_is_no_http_is_an_error_like_any_other_and_leaves_no_mark_in_the_log(
    request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with HttpRig().running() as rig:
        status, head, answer = await exchange(rig, request_)
        assert status == 400
        assert "Content-Type: application/json" in head
        assert "X-Should-Retry: false" in head
        assert (answer["error"]["code"], answer["error"]["type"]) == ("bad_http", "invalid_request_error")
        assert answer["error"]["message"].startswith("the request is not acceptable HTTP: ")
        assert (await rig.post())[0] == 200
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


async def test_a_target_may_be_the_whole_url_as_a_proxy_gets_it() -> None:
    async with HttpRig().running() as rig:
        request = rig.request().replace(b"POST /", f"POST {rig.url}/".encode())
        status, _, answer = await exchange(rig, request.replace(b"Host: gate", b"Host: gate\r\nConnection: close"))
        assert status == 200
        assert answer["choices"]


async def test_the_scheme_of_a_key_is_bearer_in_any_case() -> None:
    async with HttpRig().running() as rig:
        for scheme in ("bearer", "BEARER"):
            header = f"{scheme} {rig.server.api_key(ROLLOUT)}"
            assert (await rig.post(key=None, Authorization=header))[0] == 200
        assert (await rig.post(key=None, Authorization=f"Basic {rig.server.api_key(ROLLOUT)}"))[0] == 401


async def test_the_log_has_the_first_refusal_of_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    async with HttpRig().running() as rig:
        for temperature in (0.0, 0.1, 0.2):
            assert (await rig.post(body={"messages": QUESTION, "temperature": temperature}))[0] == 400
        for _ in range(2):
            assert (await rig.post(key="wrong"))[0] == 403
    first, second = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert first.startswith(f"the gate refused POST /ng-rollout/{ROLLOUT}/v1/chat/completions: 400 fixed_by_the_run: ")
    assert "temperature is 0, but this run samples with temperature 0.8" in first
    assert "403 foreign_key" in second


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "function", "content": "x"}, "messages[0].role: Invalid enum value 'function'; one of system, "),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url'; only text"),
        ({"role": "user", "content": "cut \ud83d"}, "a \\u escape is half of a character: text was cut within one"),
    ],
)
async def test_a_message_that_cannot_be_taken_is_told_what_can(message: dict[str, object], complaint: str) -> None:
    async with HttpRig().running() as rig:
        status, answer = await rig.post(body={"messages": [message]})
        assert status == 400
        assert complaint in answer["error"]["message"]
