"""What agents over HTTP ask for is captured alike: raw prompts, stop strings, logprobs, tool calls left as text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataplane.memory import MemoryPlane
from dataplane.schema import STAGING
from ledger.records import CallReply, CallRequest, Message, Sampling
from tests.models import SPECIAL, tiny_model, tiny_tokenizer
from tests.workers.generation.helpers import running_engine
from workers.generation.capture import Capture
from workers.generation.rendering import ChatRenderer
from workers.rpc.errors import HandlerError

pytestmark = pytest.mark.anyio

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("agent_calls") / "tiny")


@pytest.fixture
async def answer(model: Path) -> AsyncIterator[Any]:
    renderer, plane = ChatRenderer.load(model), MemoryPlane()
    async with running_engine(model, stop=renderer.stop_token_ids, decode=renderer.plain.decode) as engine:
        capture, calls = Capture(engine, renderer, plane), count()

        async def ask(text: str = "hello", *, seed: int = 3, stop: tuple[str, ...] = (), **request: Any):
            messages = () if "prompt" in request else (Message(role="user", content=text),)
            sampling = Sampling(max_tokens=30, seed=seed, stop=stop)
            reply = await capture.answer(
                CallRequest(rollout_id="r", call_id=f"r/{next(calls)}", messages=messages, sampling=sampling, **request)
            )
            (row,) = await plane.get(STAGING, [reply.coords.staging_key], ("token_ids", "token_mask", "logprobs"))
            return reply, row

        yield ask


def generated(reply: CallReply, row: dict[str, np.ndarray]) -> list[int]:
    return row["token_ids"][reply.coords.carry_len :].tolist()


@pytest.mark.parametrize("prompt", ["ab<|user|>", (41, 42, 4)])
async def test_a_raw_prompt_is_completed_as_it_is(answer: Any, prompt: str | tuple[int, ...]) -> None:
    reply, row = await answer(prompt=prompt)
    ids = tiny_tokenizer()(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
    assert SPECIAL.index("<|user|>") in ids
    assert row["token_ids"][: reply.coords.carry_len].tolist() == ids
    assert reply.message.content == tiny_tokenizer().decode(generated(reply, row), skip_special_tokens=True)
    assert reply.prompt_tokens == len(ids)


@pytest.mark.parametrize("prompt", ["", (), (5_000,)])
async def test_an_impossible_raw_prompt_is_refused(answer: Any, prompt: str | tuple[int, ...]) -> None:
    with pytest.raises(HandlerError) as error:
        await answer(prompt=prompt)
    assert error.value.failure.failure_class == "data"


async def test_a_stop_string_cuts_the_text_and_keeps_the_tokens(answer: Any) -> None:
    whole, _ = await answer()
    text = whole.message.content
    stop = text[8:10]
    reply, row = await answer(stop=(stop,))
    assert reply.message.content == text[: text.find(stop)]
    assert tiny_tokenizer().decode(generated(reply, row), skip_special_tokens=True).endswith(stop)
    assert reply.finish_reason == "stop"
    assert reply.completion_tokens == len(generated(reply, row))


async def test_logprobs_are_those_that_are_staged_and_only_come_when_asked_for(answer: Any) -> None:
    reply, row = await answer(logprobs=True)
    assert reply.logprobs is not None
    assert [t.logprob for t in reply.logprobs] == pytest.approx(row["logprobs"][reply.coords.carry_len :], abs=1e-6)
    assert [t.token for t in reply.logprobs] == [tiny_tokenizer().decode([t]) for t in generated(reply, row)]
    assert (await answer())[0].logprobs is None


async def test_tool_calls_stay_text_where_none_are_wanted(tmp_path: Path) -> None:
    # Named after a model whose format of tool calls is known.
    marks = (
        "<|im_start|>",
        "<|im_end|>",
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|endoftext|>",
        "<tool_response>",
        "</tool_response>",
    )
    path = tmp_path / "Qwen" / "Qwen3-8B"
    renderer = ChatRenderer.load(tiny_model(path, tokenizer=tiny_tokenizer(more_special=marks)))
    tokenizer = tiny_tokenizer(more_special=marks)
    completion = tokenizer(f"so:{CALL}<|im_end|>")["input_ids"]
    called = await renderer.parse([4, 5], completion)
    assert [call.function.name for call in called.tool_calls] == ["f"]
    assert called.content == "so:"
    kept = await renderer.parse([4, 5], completion, tool_calls=False)
    assert not kept.tool_calls
    assert kept.content is not None
    assert '{"name": "f", "arguments": {}}' in kept.content
