"""Large requests and answers are taken in pieces: the loop stays responsive, and the limits are said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ledger.http.bodies import MAX_MESSAGES
from tests.ledger.http.rig import HttpRig

pytestmark = pytest.mark.anyio


def conversation(messages: int, text: str) -> list[Any]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i in range(messages - 1)] + [{"role": "user", "content": "?"}]


async def test_conversations_of_thousands_of_messages_continue_like_short_ones() -> None:
    async with HttpRig().running() as rig, rig.client() as client:
        messages = conversation(3001, "some words")
        first = await client.chat.completions.create(model="m", messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": "and?"}]
        await client.chat.completions.create(model="m", messages=messages)
        assert rig.worker.requests[1].parent is not None
        status, body = await rig.post(body={"messages": conversation(MAX_MESSAGES + 1, "x")})
        assert (status, body["error"]["param"]) == (400, "messages")


async def test_logprobs_of_thousands_of_tokens_arrive_whole_and_streamed() -> None:
    async with HttpRig().running() as rig:
        rig.worker.generated = 5000
        body = {"messages": conversation(1, ""), "logprobs": True}
        status, answer = await rig.post(body=body)
        assert status == 200
        assert len(answer["choices"][0]["logprobs"]["content"]) == 5000
        async with rig.http.post(
            f"{rig.url}/ng-rollout/g0.0/v1/chat/completions",
            data=json.dumps(body | {"stream": True}),
            headers={"Authorization": f"Bearer {rig.server.api_key('g0.0')}"},
        ) as response:
            events = [
                json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: {")
            ]
        assert sum(len(e["choices"][0]["logprobs"]["content"]) for e in events if e["choices"][0]["logprobs"]) == 5000
