"""Messages to token ids and back. A continued conversation keeps its earlier tokens exactly: they are never re-tokenized.

Rendering is the `renderers` package's: its own renderer for the models it knows, the tokenizer's chat template otherwise.
Control tokens come from the template alone: a message that spells one out is text (see `workers.generation.literals`), so a
tool cannot end a turn. Everything runs one call at a time in a worker thread, since tokenizers are not safe to share between
threads.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import numpy.typing as npt

from ledger.records import FunctionCall, Message, ToolCall
from workers.generation.literals import LiteralTokenizer
from workers.generation.plain_text import PlainText
from workers.generation.text_bound import TextTooLong
from workers.generation.turn_end import after_turn
from workers.host import StartupError

T = TypeVar("T")
Tools = Sequence[dict[str, Any]]
Ids = npt.NDArray[np.int64]


class BadMessages(ValueError):
    """The chat template refuses these messages or tools."""


class ChatRenderer:
    """Chat messages of one model."""

    @classmethod
    def load(cls, model_path: Path) -> ChatRenderer:
        """Load tokenizer and renderer from a local directory. Blocks. Raises StartupError when they cannot be used."""
        tokenizer = LiteralTokenizer(_load_tokenizer(model_path))
        try:
            renderer = _create_renderer(tokenizer, model_path)
        except Exception as error:
            raise StartupError("bad_model", f"{model_path}: no renderer: {error}") from error
        return cls(tokenizer, renderer, extra_stop=_generation_config_eos(model_path))

    def __init__(self, tokenizer: LiteralTokenizer, renderer: Any, *, extra_stop: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        stop = dict.fromkeys([*cast("list[int]", renderer.get_stop_token_ids()), *extra_stop])
        self.stop_token_ids: tuple[int, ...] = tuple(stop)
        """The tokens that end an assistant turn."""
        self.bound = tokenizer.bound
        """Of the texts that are encoded here."""
        self.plain = PlainText(tokenizer.plain(), self.bound)
        self._one_at_a_time = anyio.CapacityLimiter(1)

    async def render_root(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The prompt of a new conversation, up to where the assistant speaks. Raises BadMessages or TextTooLong."""
        return await self._run(lambda: self._render(self._plain(messages), tools, to_answer=True))

    async def extend(
        self, so_far: Ids, prompt_len: int, messages: Sequence[Message], covered: int, tools: Tools = ()
    ) -> list[int]:
        """The next prompt of a conversation. It begins with `so_far`, unchanged.

        `so_far` are the conversation's exact tokens; from `prompt_len` on they are its last assistant turn.
        `messages[:covered]` are what they stand for; the rest is new. Raises BadMessages, RenderMismatch or TextTooLong.
        """

        def work() -> list[int]:
            prompt, completion = so_far[:prompt_len].tolist(), so_far[prompt_len:].tolist()
            return [
                *prompt,
                *completion,
                *self._continuation(prompt, completion, self._plain(messages), covered, tools),
            ]

        return await self._run(work)

    async def parse(
        self, prompt: Sequence[int], completion: Sequence[int], tools: Tools = (), *, tool_calls: bool = True
    ) -> Message:
        """The assistant message that a completion is. The text of a tool call that cannot be parsed stays in the content, as
        that of all does without `tool_calls`.

        Tool-call ids are derived from the tokens, so an equal conversation has equal ids.
        """
        return await self._run(lambda: self._parse(list(prompt), list(completion), tools, tool_calls))

    async def _run(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, limiter=self._one_at_a_time)

    def _plain(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The dictionaries that templates expect: content is always text, and no text spells a control token."""
        return [
            {"content": "", **_without_none(self._tokenizer.guarded(msgspec.to_builtins(message)))}
            for message in messages
        ]

    def _render(self, messages: list[dict[str, Any]], tools: Tools, *, to_answer: bool = False) -> list[int]:
        with _template_errors():
            return list(self._renderer.render_ids(messages, tools=self._specs(tools), add_generation_prompt=to_answer))

    def _specs(self, tools: Tools) -> list[dict[str, Any]] | None:
        return self._tokenizer.guarded(list(tools)) if tools else None

    def _continuation(
        self, prompt: list[int], completion: list[int], messages: list[dict[str, Any]], covered: int, tools: Tools
    ) -> list[int]:
        if not 0 < covered <= len(messages) or messages[covered - 1]["role"] != "assistant":
            raise BadMessages(f"message {covered} of {len(messages)} is not the assistant turn that is being continued")
        so_far = [*prompt, *completion]
        with _template_errors():
            bridge = self._renderer.bridge_to_next_turn(
                prompt, completion, messages[covered:], tools=self._specs(tools)
            )
        if bridge is not None and bridge.token_ids[: len(so_far)] == so_far:
            return bridge.token_ids[len(so_far) :]
        # No bridge, or one that leaves out what followed a stop token in mid-turn.
        tail = after_turn(
            lambda messages, to_answer: self._render(messages, tools, to_answer=to_answer),
            messages,
            covered,
            self.stop_token_ids,
        )
        # A completion that was cut lacks the token that ends its turn; a finished one has it.
        finished = bool(completion) and completion[-1] in self.stop_token_ids
        return tail[finished:]

    def _parse(self, prompt: list[int], completion: list[int], tools: Tools, tool_calls: bool) -> Message:
        parsed = self._renderer.parse_response(completion, tools=list(tools) or None, prompt_ids=prompt)
        good = [call for call in parsed.tool_calls if tool_calls and call.status == "ok"]
        broken = [call.raw for call in parsed.tool_calls if call not in good]
        content = "\n".join([*([parsed.content] if parsed.content else []), *broken])
        tokens = hashlib.sha256(np.array([*prompt, *completion], dtype=np.int64).tobytes()).hexdigest()
        return Message(
            role="assistant",
            content=content if content or not good else None,
            reasoning_content=parsed.reasoning_content or None,
            tool_calls=tuple(
                ToolCall(
                    id=call.id or f"call_{tokens[:20]}_{i}",
                    function=FunctionCall(name=call.name, arguments=_arguments(call.arguments)),
                )
                for i, call in enumerate(good)
            ),
        )


@contextmanager
def _template_errors() -> Generator[None]:
    try:
        yield
    except TextTooLong:
        raise
    except Exception as error:  # Templates are programs of the model's author: they raise anything.
        raise BadMessages(f"the model's chat template refuses these messages: {error}") from error


def _without_none(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


def _arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _load_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer goes by the model's type and can put another pre-tokenizer in place of the saved one (qwen2 does).
    kind: Any = PreTrainedTokenizerFast if (path / "tokenizer.json").is_file() else AutoTokenizer
    if not path.is_dir():
        raise StartupError("bad_model", f"{path} is no directory", "set model.path to a local model directory")
    try:
        return kind.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise StartupError("bad_model", f"{path}: the tokenizer cannot be loaded: {error}") from error


def _create_renderer(tokenizer: Any, path: Path) -> Any:
    """The renderer of the model that the directory is named after; the generic one for a model that has none.

    Known names are those of the Hugging Face hub, as in `.../Qwen/Qwen3-8B` or `.../models--Qwen--Qwen3-8B/snapshots/<sha>`.
    """
    import renderers
    from renderers.base import MODEL_RENDERER_MAP
    from renderers.default import DefaultRenderer

    names = ["/".join(path.absolute().parts[-2:])]
    names += [
        "/".join(cached.groups()) for cached in re.finditer(r"/models--([^/]+?)--([^/]+)/", path.as_posix() + "/")
    ]
    known = next((name for name in names if name in MODEL_RENDERER_MAP), None)
    tokenizer.name_or_path = known or str(path)
    # Where the template would drop the reasoning of earlier turns, the conversation's exact tokens are kept instead.
    config = renderers.AutoRendererConfig(thinking_retention="all") if known else None
    renderer = cast(Any, renderers).create_renderer(tokenizer, config)
    if isinstance(renderer, DefaultRenderer) and not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template")
    return renderer


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _generation_config_eos(path: Path) -> list[int]:
    """The model's own end tokens; a chat model may end turns with another token than its tokenizer's `eos_token`."""
    file = path / "generation_config.json"
    if not file.is_file():
        return []
    try:
        eos = msgspec.json.decode(file.read_bytes(), type=_GenerationConfig).eos_token_id
    except msgspec.MsgspecError as error:
        raise StartupError("bad_model", f"{file}: {error}") from error
    return eos if isinstance(eos, list) else [] if eos is None else [eos]
