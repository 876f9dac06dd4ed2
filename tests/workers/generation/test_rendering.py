"""Rendering: what a prompt is, and that a continued conversation keeps its tokens, whatever they re-tokenize to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ledger.records import FunctionCall, Message, ToolCall
from tests.models import END, TEMPLATE, tiny_model, tiny_tokenizer
from workers.generation.rendering import BadMessages, ChatRenderer
from workers.generation.turn_end import RenderMismatch
from workers.host import StartupError

pytestmark = pytest.mark.anyio

QWEN3_SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"]
QWEN3_SPECIAL += ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


def chat(*turns: str) -> list[Message]:
    """Messages from "role: content" lines."""
    pairs = (turn.split(": ", 1) for turn in turns)
    return [Message(role=role, content=content) for role, content in pairs]  # type: ignore[arg-type]


def saved(path: Path, template: str | None = TEMPLATE) -> Path:
    tiny_tokenizer(template).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(saved(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    path = tmp_path_factory.mktemp("models") / "Qwen" / "Qwen3-0.6B"
    tiny_tokenizer(None, QWEN3_SPECIAL).save_pretrained(path)
    return ChatRenderer.load(path)


def ids(text: str, special: Any = ()) -> list[int]:
    return tiny_tokenizer(None, special)(text, add_special_tokens=False)["input_ids"]


def q(text: str) -> list[int]:
    return ids(text, QWEN3_SPECIAL)


async def extended(r: ChatRenderer, prompt: list[int], completion: list[int], *rest: Any) -> list[int]:
    """The continuation alone, after checking that all before it was kept."""
    so_far = [*prompt, *completion]
    result = await r.extend(np.array(so_far, np.int64), len(prompt), *rest)
    assert result[: len(so_far)] == so_far
    return result[len(so_far) :]


async def test_a_root_prompt_is_the_chat_templates(renderer: ChatRenderer) -> None:
    got = await renderer.render_root(chat("system: be brief", "user: hi there"))
    assert got == ids("<|system|>be brief<|end|><|user|>hi there<|end|><|assistant|>")


async def test_a_finished_turn_is_continued_after_its_end_token(renderer: ChatRenderer) -> None:
    messages = chat("user: hi", "assistant: yo", "user: bye")
    got = await extended(renderer, ids("<|user|>hi<|end|><|assistant|>"), ids("yo<|end|>"), messages, 2)
    assert got == ids("<|user|>bye<|end|><|assistant|>")


async def test_a_cut_turn_gets_the_end_token_as_prompt(renderer: ChatRenderer) -> None:
    messages = chat("user: hi", "assistant: yo", "user: bye")
    for completion in (ids("yo"), []):
        got = await extended(renderer, ids("<|user|>hi<|end|><|assistant|>"), completion, messages, 2)
        assert got == ids("<|end|><|user|>bye<|end|><|assistant|>")


async def test_tokens_that_would_not_come_back_from_their_text_are_kept(renderer: ChatRenderer) -> None:
    odd = [*ids("<|user|>"), *ids("y"), *ids("<|unk|><|pad|>"), *ids("o"), END]
    message = await renderer.parse(ids("<|user|>hi<|end|><|assistant|>"), odd)
    assert message == Message(role="assistant", content="yo")
    assert ids("yo<|end|>") != odd, "its text re-tokenizes differently"
    messages = [*chat("user: hi"), message, *chat("user: bye")]
    got = await extended(renderer, ids("<|user|>hi<|end|><|assistant|>"), odd, messages, 2)
    assert got == ids("<|user|>bye<|end|><|assistant|>")


async def test_text_between_turns_is_part_of_the_next_prompt(tmp_path: Path) -> None:
    spaced = TEMPLATE.replace("'<|end|>'", "'<|end|>\n'")
    renderer = ChatRenderer.load(saved(tmp_path, spaced))
    prompt = ids("<|user|>hi<|end|>\n<|assistant|>")
    messages = chat("user: hi", "assistant: yo", "user: bye")
    assert await renderer.render_root(messages[:1]) == prompt
    assert await extended(renderer, prompt, ids("yo<|end|>"), messages, 2) == ids("\n<|user|>bye<|end|>\n<|assistant|>")
    assert await extended(renderer, prompt, ids("yo"), messages, 2) == ids("<|end|>\n<|user|>bye<|end|>\n<|assistant|>")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (TEMPLATE.replace("'<|end|>'", "''"), "without a stop token"),
        (TEMPLATE.replace("m['content']", "''"), "does not show the assistant turn"),
        # The end of the next message would be taken for that of the turn.
        (
            TEMPLATE.replace("+ '<|end|>'", "+ ('<|end|>' if loop.last or m['role'] == 'user' else '')"),
            "ends the assistant turn differently",
        ),
    ],
)
async def test_a_template_that_cannot_continue_is_a_mismatch(tmp_path: Path, template: str, why: str) -> None:
    renderer = ChatRenderer.load(saved(tmp_path, template))
    messages = chat("user: hi", "assistant: yo", "user: bye")
    prompt = await renderer.render_root(messages[:1])
    with pytest.raises(RenderMismatch, match=why):
        await extended(renderer, prompt, ids("yo<|end|>"), messages, 2)


async def test_what_a_template_changes_in_earlier_messages_does_not_matter(tmp_path: Path) -> None:
    """It has been said already, in exact tokens; here the beginning changes with the number of messages."""
    renderer = ChatRenderer.load(saved(tmp_path, "{{ messages | length }}" + TEMPLATE))
    messages = chat("user: hi", "assistant: yo", "user: bye")
    prompt = await renderer.render_root(messages[:1])
    assert await extended(renderer, prompt, ids("yo<|end|>"), messages, 2) == ids("<|user|>bye<|end|><|assistant|>")


async def test_messages_that_the_template_refuses_are_bad(tmp_path: Path, renderer: ChatRenderer) -> None:
    picky = ChatRenderer.load(saved(tmp_path, "{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(BadMessages, match="roles must alternate"):
        await picky.render_root(chat("user: hi"))
    with pytest.raises(BadMessages, match="message 1 of 2 is not the assistant turn"):
        await extended(renderer, ids("<|user|>hi"), [], chat("user: hi", "user: bye"), 1)


async def test_a_known_model_has_its_own_renderer(qwen3: ChatRenderer) -> None:
    got = await qwen3.render_root(chat("user: hi"))
    assert got == q("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert qwen3.stop_token_ids == (*q("<|im_end|>"), *q("<|endoftext|>"))


async def test_a_known_model_parses_reasoning_and_tool_calls(qwen3: ChatRenderer) -> None:
    prompt = await qwen3.render_root(chat("user: 2+3?"), [TOOL])
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "x"}}\n</tool_call>'
    completion = q(f"<think>\nsum\n</think>\n\n{call}\n{call}<|im_end|>")
    message = await qwen3.parse(prompt, completion, [TOOL])
    assert message == await qwen3.parse(prompt, completion, [TOOL])
    assert (message.content, message.reasoning_content) == (None, "sum")
    assert [c.function.name for c in message.tool_calls] == ["add", "add"]
    assert [json.loads(c.function.arguments) for c in message.tool_calls] == [{"a": 2, "b": "x"}] * 2
    assert len({c.id for c in message.tool_calls}) == 2


async def test_a_broken_tool_call_stays_readable(qwen3: ChatRenderer) -> None:
    message = await qwen3.parse(q("hi"), q('so <tool_call>\n{"name": add}\n</tool_call><|im_end|>'), [TOOL])
    assert message.tool_calls == ()
    assert '{"name": add}' in (message.content or "")


async def test_a_known_model_is_continued_through_a_tool_call(qwen3: ChatRenderer) -> None:
    question = chat("user: 2+3?")
    prompt = await qwen3.render_root(question, [TOOL])
    completion = q('<think>\nsum\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>')
    message = await qwen3.parse(prompt, completion, [TOOL])
    result = Message(role="tool", content="5", tool_call_id=message.tool_calls[0].id)
    got = await extended(qwen3, prompt, completion, [*question, message, result], 2, [TOOL])
    assert got == q("\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


async def test_a_known_model_keeps_its_earlier_reasoning(qwen3: ChatRenderer) -> None:
    """The template drops it from history; the conversation's exact tokens have it, repeated by the client or not."""
    question = chat("user: hi")
    prompt = await qwen3.render_root(question)
    completion = q("<think>\nhm\n</think>\n\nyo<|im_end|>")
    for reasoning in ("hm", None):
        thought = Message(role="assistant", content="yo", reasoning_content=reasoning)
        got = await extended(qwen3, prompt, completion, [*question, thought, *chat("user: bye")], 2)
        assert got == q("\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n")


async def test_a_known_models_cut_turn_is_closed(qwen3: ChatRenderer) -> None:
    messages = chat("user: hi", "assistant: yo", "user: bye")
    prompt = await qwen3.render_root(messages[:1])
    for cut, closing in (("yo", "<|im_end|>"), ("<think>\nhm", "</think><|im_end|>")):
        got = await extended(qwen3, prompt, q(cut), messages, 2)
        assert got == q(f"{closing}\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n")


async def test_a_model_in_the_hub_cache_is_known_by_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "0123abc"
    tiny_tokenizer(None, QWEN3_SPECIAL).save_pretrained(path)
    renderer = ChatRenderer.load(path)
    assert (await renderer.render_root(chat("user: hi")))[:1] == q("<|im_start|>")


async def test_tool_calls_in_the_history_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m['role'] }}{% for c in m['tool_calls'] or [] %}"
        "{{ c['function']['name'] }}{{ c['function']['arguments']['a'] }}{% endfor %}{% endfor %}"
    )
    renderer = ChatRenderer.load(saved(tmp_path, template))
    call = ToolCall(id="c", function=FunctionCall(name="add", arguments='{"a": 7}'))
    assert await renderer.render_root([Message(role="assistant", tool_calls=(call,))]) == ids("assistantadd7")


async def test_a_saved_tokenizer_is_used_as_it_is_for_any_model_type(tmp_path: Path) -> None:
    renderer = ChatRenderer.load(tiny_model(tmp_path, arch="qwen2"))
    assert await renderer.render_root(chat("user: a b")) == ids("<|user|>a b<|end|><|assistant|>")


def test_the_models_own_end_tokens_stop_too(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert ChatRenderer.load(path).stop_token_ids == (END,)
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.6}')
    assert ChatRenderer.load(path).stop_token_ids == (END, 2)
    (path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(StartupError, match=r"generation_config\.json.*eos_token_id"):
        ChatRenderer.load(path)


def test_a_directory_without_a_usable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no directory"):
        ChatRenderer.load(tmp_path / "none")
    with pytest.raises(StartupError, match="tokenizer cannot be loaded"):
        ChatRenderer.load(tmp_path)
    with pytest.raises(StartupError, match="no chat template"):
        ChatRenderer.load(saved(tmp_path / "bare", None))
    (saved(tmp_path / "broken") / "tokenizer.json").write_text("{")
    with pytest.raises(StartupError, match="tokenizer cannot be loaded"):
        ChatRenderer.load(tmp_path / "broken")
