"""A stop string ends a completion at the very token that completes it; the agent gets the text before it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.records import FunctionCall, Message, Sampling, ToolCall
from tests.models import tiny_model, tiny_tokenizer
from tests.workers.generation.helpers import load, running_engine, worst_error
from workers.generation.stop_text import StopText, cut

pytestmark = pytest.mark.anyio

PROMPT = [4, 20, 21, 22, 1, 5]


def utf8(ids: list[int]) -> str:
    """A byte-level tokenizer: one token per byte."""
    return bytes(ids).decode(errors="replace")


@given(st.text("abä€🙂", max_size=30), st.lists(st.text("abä€🙂", min_size=1, max_size=4), min_size=1, max_size=3))
def test_it_is_reached_at_the_token_that_completes_it_and_at_none_before(text: str, stop: list[str]) -> None:
    prompt, ids = list(b"ab\xe2"), list(text.encode())
    stop_text = StopText(utf8, stop)
    reached = [n for n in range(1, len(ids) + 1) if stop_text.reached([*prompt, *ids[:n]], len(prompt))]
    ends = [text.find(s) + len(s) for s in stop if s in text]
    assert reached[:1] == ([len(text[: min(ends)].encode())] if ends else [])


def test_a_message_is_cut_before_the_first_stop_string() -> None:
    call = ToolCall(id="c", function=FunctionCall(name="f", arguments="{}"))
    message = Message(role="assistant", content="one two three", reasoning_content="thinking", tool_calls=(call,))
    assert cut(message, ["three", "two"]) == Message(role="assistant", content="one ", reasoning_content="thinking")
    assert cut(message, ["ink"]) == Message(role="assistant", reasoning_content="th")
    assert cut(message, ["four"]) == message
    assert cut(Message(role="assistant", tool_calls=(call,)), ["x"]).tool_calls == (call,)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("stop") / "tiny")


async def test_an_engine_ends_at_a_stop_string_and_keeps_its_tokens(model: Path) -> None:
    decode = tiny_tokenizer().decode
    async with running_engine(model, decode=decode) as engine:
        free = await engine.generate("free", PROMPT, Sampling(max_tokens=40, seed=3))
        text = decode(free.token_ids)
        stop = text[10:12]
        sampling = Sampling(max_tokens=40, seed=3, stop=("never seen", stop))
        stopped = await engine.generate("stopped", PROMPT, sampling)
        length = text.find(stop) + len(stop)
        assert stopped.token_ids == free.token_ids[:length]
        assert decode(stopped.token_ids).endswith(stop)
        assert (stopped.finish_reason, free.finish_reason) == ("stop", "length")
        assert worst_error({0: load(model)}, PROMPT, stopped, sampling) < 1e-4
        with pytest.raises(ValueError, match=r"sampling\.stop"):
            await engine.generate("empty", PROMPT, Sampling(max_tokens=4, stop=("",)))


async def test_an_engine_without_a_decoder_refuses_stop_strings(model: Path) -> None:
    async with running_engine(model) as engine:
        with pytest.raises(ValueError, match="decoder"):
            await engine.generate("a", PROMPT, Sampling(max_tokens=4, stop=("x",)))
