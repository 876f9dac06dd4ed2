"""The official `openai` client, unchanged, talks to a rollout as to OpenAI, and is told what to do when it cannot."""

from __future__ import annotations

import anyio
import anyio.to_thread
import openai
import pytest

from ledger.http.server import Limits
from ledger.records import FunctionCall, Message, ToolCall
from tests.ledger.http.rig import QUESTION, ROLLOUT, RUN, HttpRig

pytestmark = pytest.mark.anyio

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = ToolCall(id="call_1", function=FunctionCall(name="add", arguments='{"a": 1}'))


async def test_a_conversation_continues_its_exact_tokens() -> None:
    async with HttpRig().running() as rig, rig.client() as client:
        first = await client.chat.completions.create(model="gpt-4o", messages=QUESTION, max_tokens=9, user="me")
        message = first.choices[0].message
        assert message.content
        assert (message.role, first.choices[0].finish_reason, first.model) == ("assistant", "stop", "tiny")
        assert first.id == f"chatcmpl-{ROLLOUT}/0"
        second = await client.chat.completions.create(
            model="gpt-4o",
            messages=[*QUESTION, message, {"role": "user", "content": [{"type": "text", "text": "and?"}]}],
        )
        assert second.usage is not None
        assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens
        receipt = await rig.ledger.seal(ROLLOUT)
        assert [link.call_id for link in receipt.chain] == [f"{ROLLOUT}/0", f"{ROLLOUT}/1"]
        assert receipt.verdict == "trainable"
        assert second.usage.total_tokens == receipt.chain[-1].end


async def test_echoed_answers_with_all_of_their_keys_continue_too() -> None:
    async with HttpRig().running() as rig, rig.client() as client:
        first = await client.chat.completions.create(model="m", messages=QUESTION)
        echoed = first.choices[0].message.model_dump()
        await client.chat.completions.create(model="m", messages=[*QUESTION, echoed, *QUESTION])
        assert rig.worker.requests[1].parent is not None


async def test_the_run_s_sampling_applies_and_a_request_may_shorten_stop_and_seed() -> None:
    async with HttpRig().running() as rig, rig.client() as client:
        await client.chat.completions.create(
            model="m", messages=QUESTION, max_completion_tokens=9, stop="END", seed=5, temperature=0.8, top_p=0.9, n=1
        )
        await client.chat.completions.create(model="m", messages=QUESTION, max_tokens=10_000, stop=["a", "b"])
        first, second = (request.sampling for request in rig.worker.requests)
        assert (first.max_tokens, first.stop, first.seed) == (9, ("END",), 5)
        assert (second.max_tokens, second.stop) == (RUN.max_tokens, ("a", "b"))
        for sampling in (first, second):
            assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop_token_ids) == (
                0.8,
                0.9,
                20,
                (7,),
            )
        assert second.seed is not None
        with pytest.raises(
            openai.BadRequestError, match=r"temperature is 0\.2, but this run samples with temperature 0\.8"
        ):
            await client.chat.completions.create(model="m", messages=QUESTION, temperature=0.2)


async def test_with_sampling_by_request_the_request_decides() -> None:
    async with HttpRig(mode="request").running() as rig, rig.client() as client:
        await client.chat.completions.create(
            model="m", messages=QUESTION, temperature=0.2, extra_body={"top_k": -1, "top_p": 1}
        )
        sampling = rig.worker.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.2, 1, 0)


async def test_tools_are_called_and_their_results_go_back() -> None:
    async with HttpRig().running() as rig, rig.client() as client:
        rig.worker.message = Message(role="assistant", tool_calls=(CALL,))
        first = await client.chat.completions.create(model="m", messages=QUESTION, tools=[TOOL], tool_choice="auto")
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.arguments == '{"a": 1}'
        rig.worker.message = None
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        await client.chat.completions.create(
            model="m", messages=[*QUESTION, message, result], tools=[TOOL], tool_choice="none"
        )
        first_request, request = rig.worker.requests
        assert first_request.tools == request.tools == (TOOL,)
        assert (first_request.parse_tool_calls, request.parse_tool_calls) == (True, False)
        assert request.parent is not None
        assert request.messages[-1] == Message(role="tool", tool_call_id="call_1", content="3")


@pytest.mark.parametrize("usage", [False, True])
async def test_a_streamed_answer_adds_up_to_the_whole_one(usage: bool) -> None:
    async with HttpRig().running() as rig, rig.client() as client:
        rig.worker.message = Message(
            role="assistant", content="hello there", reasoning_content="hm", tool_calls=(CALL,)
        )
        options = {"stream_options": {"include_usage": True}} if usage else {}
        text, reasoning, names, finish, totals = "", "", [], [], []
        stream = await client.chat.completions.create(model="m", messages=QUESTION, stream=True, **options)
        async for chunk in stream:
            assert chunk.id == f"chatcmpl-{ROLLOUT}/0"
            if chunk.usage:
                totals.append(chunk.usage.total_tokens)
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                names += [t.function.name for t in choice.delta.tool_calls or () if t.function]
                finish += [choice.finish_reason] if choice.finish_reason else []
        assert (text, reasoning, names, finish) == ("hello there", "hm", ["add"], ["tool_calls"])
        assert len(totals) == usage


async def test_the_client_s_own_accumulating_stream_works() -> None:
    async with HttpRig().running() as rig, rig.client() as client:
        rig.worker.message = Message(role="assistant", content="hello", tool_calls=(CALL,))
        async with client.chat.completions.stream(model="m", messages=QUESTION, tools=[TOOL]) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "hello"
        assert final.choices[0].message.tool_calls is not None
        assert final.choices[0].message.tool_calls[0].function.name == "add"


async def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    async with HttpRig().running() as rig, rig.client() as client:
        rig.worker.generated = 3
        answer = await client.chat.completions.create(model="m", messages=QUESTION, logprobs=True, top_logprobs=0)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [(t.token, t.logprob, t.bytes) for t in logprobs.content] == [
            (f"t{i}", -0.25, [116, 48 + i]) for i in range(3)
        ]
        text = await client.completions.create(model="m", prompt="abc", logprobs=0)
        assert text.choices[0].logprobs is not None
        assert text.choices[0].logprobs.text_offset == [0, 2, 4]


@pytest.mark.parametrize("prompt", ["once upon", ["once upon"], [5, 6, 7], [[5, 6, 7]]])
async def test_a_completion_takes_text_or_token_ids_and_is_a_root(prompt) -> None:
    async with HttpRig().running() as rig, rig.client() as client:
        answer = await client.completions.create(model="m", prompt=prompt, max_tokens=4)
        assert answer.choices[0].text
        assert answer.id == f"cmpl-{ROLLOUT}/0"
        assert rig.worker.requests[0].prompt in ("once upon", (5, 6, 7))
        parts = [
            c.choices[0].text async for c in await client.completions.create(model="m", prompt=prompt, stream=True)
        ]
        assert "".join(parts)
        assert [r.parent for r in rig.worker.requests] == [None, None]


async def test_the_models_are_listed() -> None:
    async with HttpRig().running() as rig, rig.client() as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_the_blocking_client_works_too() -> None:
    async with HttpRig().running() as rig:

        def agent() -> list[str]:
            client = rig.blocking_client()
            answer = client.chat.completions.create(model="m", messages=QUESTION)
            chunks = client.chat.completions.create(model="m", messages=QUESTION, stream=True)
            streamed = "".join(c.choices[0].delta.content or "" for c in chunks)
            rig.worker.before = fail
            with pytest.raises(openai.InternalServerError, match="staging"):
                client.with_options(max_retries=0).chat.completions.create(model="m", messages=QUESTION)
            return [answer.choices[0].message.content or "", streamed]

        async def fail() -> None:
            raise RuntimeError("staging failed")

        assert all(await anyio.to_thread.run_sync(agent))
        assert not rig.unsettled()


async def test_a_cancelled_call_is_aborted_in_the_engine_and_settled() -> None:
    async with HttpRig().running() as rig, rig.client() as client:
        rig.worker.before = anyio.sleep_forever
        for stream in (False, True):
            with anyio.move_on_after(0.2):
                await client.chat.completions.create(model="m", messages=QUESTION, stream=stream)
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.2, max_retries=0).chat.completions.create(model="m", messages=QUESTION)
        await rig.idle()
        assert not rig.unsettled()
        assert [failure.reason for failure in rig.failures()] == ["cancelled"] * 3


async def test_a_sealed_rollout_answers_409_without_retries() -> None:
    async with HttpRig().running() as rig, rig.client() as client:
        await client.chat.completions.create(model="m", messages=QUESTION)
        await rig.ledger.seal(ROLLOUT)
        with pytest.raises(openai.ConflictError, match="sealed: it takes no more calls") as error:
            await client.chat.completions.create(model="m", messages=QUESTION)
        assert error.value.code == "rollout_closed"
        assert len(rig.worker.requests) == 1


async def test_a_rollout_sealed_during_a_call_answers_409() -> None:
    async with HttpRig().running() as rig, rig.client() as client:

        async def sealed_meanwhile() -> None:
            await rig.ledger.seal(ROLLOUT)

        rig.worker.before = sealed_meanwhile
        with pytest.raises(openai.ConflictError):
            await client.chat.completions.create(model="m", messages=QUESTION)


async def test_missing_and_foreign_keys_are_told_apart() -> None:
    async with HttpRig().running(ROLLOUT, "g0.1") as rig:
        status, body = await rig.post(key=None)
        assert (status, body["error"]["code"]) == (401, "missing_key")
        assert "Authorization: Bearer" in body["error"]["message"]
        foreign = openai.AsyncOpenAI(base_url=rig.server.base_url(ROLLOUT), api_key=rig.server.api_key("g0.1"))
        async with foreign as client:
            with pytest.raises(openai.PermissionDeniedError, match=r"key of rollout 'g0\.0'"):
                await client.chat.completions.create(model="m", messages=QUESTION)
        for key in ("x", "\u00e4", rig.server.control_token, rig.server.api_key(ROLLOUT)[:-1]):
            status, body = await rig.post(key=key)
            assert (status, body["error"]["code"]) == (403, "foreign_key")
        assert not rig.worker.requests


@pytest.mark.parametrize("rollout_id", ["job:17", "a%20b", "", "-x", "x" * 129, "%2e%2e", "a%2Fb"])
async def test_an_illegal_rollout_id_is_refused_before_anything_else(rollout_id: str) -> None:
    async with HttpRig().running() as rig:
        status, body = await rig.post(rollout_id=rollout_id, key="any")
        assert (status, body["error"]["code"]) == (400, "illegal_rollout_id")
        assert "letters, digits" in body["error"]["message"]


async def test_an_unknown_rollout_is_404() -> None:
    async with HttpRig().running() as rig, rig.client("g7.3") as client:
        with pytest.raises(openai.NotFoundError, match=r"rollout 'g7\.3' is not open"):
            await client.chat.completions.create(model="m", messages=QUESTION)
        status, body = await rig.post("embeddings")
        assert (status, body["error"]["code"]) == (404, "unknown_path")
        assert "chat/completions, completions and models" in body["error"]["message"]


async def test_a_body_that_is_too_large_is_413() -> None:
    async with HttpRig(limits=Limits(max_body_bytes=1000)).running() as rig, rig.client() as client:
        with pytest.raises(openai.APIStatusError, match=r"raise gate\.max_body_bytes") as error:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 1000}])
        assert error.value.status_code == 413
        await client.chat.completions.create(model="m", messages=QUESTION)

        async def chunks():
            for _ in range(20):
                yield b"x" * 100

        url, headers = rig.server.base_url(ROLLOUT), {"Authorization": f"Bearer {rig.server.api_key(ROLLOUT)}"}
        async with rig.http.post(f"{url}/chat/completions", data=chunks(), headers=headers) as response:
            assert response.status == 413


async def test_the_limit_of_calls_is_429_without_retries() -> None:
    async with HttpRig(max_calls=2).running() as rig, rig.client() as client:
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=QUESTION)
        with pytest.raises(openai.RateLimitError, match=r"all of its 2 model calls.*rollout\.max_calls"):
            await client.chat.completions.create(model="m", messages=QUESTION)
        assert len(rig.worker.requests) == 2


async def test_the_limit_of_open_rollouts_is_429_until_one_is_free() -> None:
    async with HttpRig(limits=Limits(max_open_rollouts=1)).running(ROLLOUT, "g0.1") as rig:
        release = anyio.Event()
        rig.worker.before = release.wait
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.post)
            while not rig.worker.running:
                await anyio.sleep(0.005)
            status, body = await rig.post(rollout_id="g0.1")
            assert (status, body["error"]["code"]) == (429, "too_many_rollouts")
            tasks.start_soon(rig.post)  # The same rollout may make another call.
            while rig.worker.running < 2:
                await anyio.sleep(0.005)
            release.set()
        status, _ = await rig.post(rollout_id="g0.1")
        assert status == 200


async def test_a_failed_call_is_503_and_may_be_made_again() -> None:
    async with HttpRig().running() as rig, rig.client(max_retries=3) as client:
        attempts = 0

        async def fail_once() -> None:
            nonlocal attempts
            attempts += 1
            if attempts == 1:
                raise RuntimeError("staging failed: no space")

        rig.worker.before = fail_once
        answer = await client.chat.completions.create(model="m", messages=QUESTION)
        assert answer.id == f"chatcmpl-{ROLLOUT}/1"
        (failure,) = rig.failures()
        assert (failure.call_id, failure.reason) == (f"{ROLLOUT}/0", "generation_failed")
        assert "no space" in failure.detail
        receipt = await rig.ledger.seal(ROLLOUT)
        assert receipt.verdict == "trainable"


async def test_a_call_past_its_deadline_is_504() -> None:
    async with HttpRig(call_timeout_s=0.1).running() as rig:
        rig.worker.before = anyio.sleep_forever
        status, body = await rig.post()
        assert (status, body["error"]["code"]) == (504, "timeout")
        assert rig.failures()[0].reason == "timeout"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"min_p": 0.1}, "min_p"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools[0].function"),
    ],
)
async def test_what_would_change_the_answer_is_refused_by_name(body, param: str) -> None:
    async with HttpRig().running() as rig:
        status, answer = await rig.post(body={"messages": QUESTION} | body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert not rig.worker.requests


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
    ],
)
async def test_a_completion_refuses_what_it_cannot_do(body, param: str) -> None:
    async with HttpRig().running() as rig:
        status, answer = await rig.post("completions", {"prompt": "x"} | body)
        assert (status, answer["error"]["param"]) == (400, param)


async def test_what_does_not_matter_is_ignored() -> None:
    ignored = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "response_format": {"type": "text"},
        "frequency_penalty": 0,
        "tools": None,
        "stop": None,
    }
    async with HttpRig().running() as rig:
        assert (await rig.post(body={"messages": QUESTION, "model": "any"} | ignored))[0] == 200
