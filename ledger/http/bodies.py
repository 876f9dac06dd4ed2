"""The bodies of OpenAI requests, as far as they are understood: every key is used, ignored by name, or refused.

Ignored: `model` (the run's model answers), `user`, `metadata`, `store`, `service_tier`, `safety_identifier`,
`prompt_cache_key`, `prompt_cache_retention`, `stream_options.include_obfuscation`, a message's `annotations`. They do not
change what the model says. Whatever would, and is not supported, is refused: silence would train on something else than what
the agent meant.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from ledger.http.errors import ApiError, refused
from ledger.records import FunctionCall, Message, ToolCall

MAX_MESSAGES = 8192
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Body = TypeVar("Body", bound=Struct)

_AT = re.compile(r" - at `\$\.?(.*)`$")
_ALLOWED = {
    "role": "one of system, developer, user, assistant, tool",
    "content.type": "only text: a model of text is trained here",
    "tools.type": "only function",
    "tool_calls.type": "only function",
}
"""What a place may hold, where the error says only what it may not."""
_UNKNOWN = re.compile(r"unknown field `(.*?)`")


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: str


class CalledTool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A message as clients send it, answers echoed with all of their keys included."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Any = None

    def plain(self) -> Message:
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        return Message(
            role="system" if self.role == "developer" else self.role,
            content=content,
            reasoning_content=self.reasoning_content,
            tool_calls=tuple(
                ToolCall(id=c.id, function=FunctionCall(name=c.function.name, arguments=c.function.arguments))
                for c in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id,
            name=self.name,
        )


class ToolFunction(Struct, frozen=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: ToolFunction


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: Any = None


class ResponseFormat(Struct, frozen=True, kw_only=True):
    type: str


class _Generation(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Raises ApiError for what is understood and not supported."""
        _refuse_unless(self.n in (None, 1), "n", f"{self.n}: one completion per call; make several calls")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            text = f"{value}: penalties are not supported, as tokens would not be drawn from the policy; leave it out"
            _refuse_unless(not value, name, text)
        _refuse_unless(not self.logit_bias, "logit_bias", "not supported; leave it out")
        if self.stream_options is not None:
            _refuse_unless(bool(self.stream), "stream_options", "only together with `stream: true`")


class ChatBody(_Generation, frozen=True, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens that the agent wants."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    def check(self) -> None:
        super().check()
        kind = "text" if self.response_format is None else self.response_format.type
        text = f"{kind!r}: answers are free text here; leave it out, and parse or score what the model says"
        _refuse_unless(kind == "text", "response_format", text)
        text = (
            "forced tool calls need constrained decoding, which would train on tokens the policy did not choose freely"
        )
        _refuse_unless(self.tool_choice in (None, "auto", "none"), "tool_choice", f"only auto or none: {text}")
        text = "false is not supported: leave it out, and use only the first call of an answer"
        _refuse_unless(self.parallel_tool_calls is not False, "parallel_tool_calls", text)
        text = f"{self.top_logprobs}: only the sampled token's logprob is kept; use 0"
        _refuse_unless(not self.top_logprobs, "top_logprobs", text)
        if self.tools:
            _check_tools(self.tools)


class CompletionBody(_Generation, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def text_or_ids(self) -> str | list[int]:
        """The prompt. Raises ApiError unless it is exactly one."""
        prompt = self.prompt
        if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
            _refuse_unless(len(prompt) == 1, "prompt", f"{len(prompt)} prompts: one per call; make several calls")
            prompt = cast("str | list[int]", prompt[0])
        _refuse_unless(len(prompt) > 0, "prompt", "is empty: at least one token is needed")
        return cast("str | list[int]", prompt)

    def check(self) -> None:
        super().check()
        _refuse_unless(not self.echo, "echo", "true is not supported; leave it out")
        _refuse_unless(self.best_of in (None, 1), "best_of", f"{self.best_of}: only 1")
        _refuse_unless(not self.suffix, "suffix", "not supported; leave it out")
        text = f"{self.logprobs}: only the sampled token's logprob is kept; use 0"
        _refuse_unless(not self.logprobs, "logprobs", text)


def decode(body: type[Body], data: bytes) -> Body:
    """Decode untrusted JSON. Raises ApiError 400, which names the place, what came and what to do."""
    try:
        return _decoder(body).decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _explained(str(error)) from error


def _explained(problem: str) -> ApiError:
    found = _AT.search(problem)
    unknown = _UNKNOWN.search(problem)
    place = found[1] if found else ""
    if unknown:
        param = f"{place}.{unknown[1]}" if place else unknown[1]
        return refused(
            f"{param}: not supported, and it may change what the model says; leave it out (docs/gate.md lists what is)",
            param=param,
            code="unsupported_parameter",
        )
    text = _AT.sub("", problem) + _allowed(problem, place)
    return refused(f"{place}: {text}" if place else f"the body is not acceptable: {text}", param=place or None)


def _allowed(problem: str, place: str) -> str:
    if problem.startswith("Input data was truncated"):
        return " (the JSON ends early, or a \\u escape is half of a character: text was cut within one)"
    if problem.startswith("Invalid"):
        names = re.sub(r"\[.*?\]", "", place).split(".")
        return next((f"; {_ALLOWED[key]}" for n in (1, 2) if (key := ".".join(names[-n:])) in _ALLOWED), "")
    return ""


@cache
def _decoder(body: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(body)


def _check_tools(tools: list[dict[str, Any]]) -> None:
    try:
        msgspec.convert(tools, list[ToolSpec])
        msgspec.msgpack.encode(tools)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        found = _AT.search(str(error))
        place = f"tools{found[1]}" if found else "tools"
        text = _AT.sub("", str(error)) + _allowed(str(error), place)
        raise refused(f"{place}: {text}", param=place) from error


def _refuse_unless(fine: bool, param: str, text: str) -> None:
    if not fine:
        raise refused(f"{param}: {text}", param=param, code="unsupported_parameter")
