"""What goes back to an agent: a call's reply in the shapes of the OpenAI API, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ledger.ids import response_id
from ledger.records import CallReply, TokenLogprob, ToolCall

KEEP_ALIVE = b": the call is running\n\n"
"""A comment, which clients skip."""
LARGE = 1000
"""Tokens with logprobs."""
DONE = b"data: [DONE]\n\n"

FinishReason = Literal["stop", "length", "tool_calls"]


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Delta(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An answer's message, or a part of one."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: Sequence[Any] | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class _IndexedToolCall(Struct, frozen=True, kw_only=True):
    index: int
    id: str
    function: Any
    type: str = "function"


class TokenEntry(Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: tuple[()] = ()


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    content: list[TokenEntry]
    refusal: None = None


class TextLogprobs(Struct, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    text_offset: list[int]
    top_logprobs: None = None


class Choice(Struct, frozen=True, kw_only=True):
    """`message` of a whole chat answer, `delta` of a chunk, `text` of a completion."""

    index: int = 0
    message: Delta | UnsetType = UNSET
    delta: Delta | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: ChatLogprobs | TextLogprobs | None = None
    finish_reason: FinishReason | None = None


class Response(Struct, frozen=True, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    """Names the weights that answered."""
    choices: tuple[Choice, ...]
    usage: Usage | UnsetType | None = UNSET


_encode = msgspec.json.Encoder().encode


class Answer:
    """One committed reply, ready to be sent. `created` is in Unix seconds."""

    def __init__(self, reply: CallReply, *, model: str, created: int, chat: bool) -> None:
        self._reply = reply
        self._model = model
        self._created = created
        self._chat = chat

    @property
    def large(self) -> bool:
        """Whether encoding it takes milliseconds, and so belongs in a thread."""
        return self._reply.logprobs is not None and len(self._reply.logprobs) > LARGE

    def whole(self) -> bytes:
        """The body of a plain response."""
        reply, message = self._reply, self._reply.message
        if self._chat:
            said = Delta(
                role="assistant",
                content=message.content,
                reasoning_content=message.reasoning_content or UNSET,
                tool_calls=message.tool_calls or UNSET,
                refusal=None,
            )
            choice = Choice(message=said, logprobs=self._chat_logprobs(), finish_reason=self._finish_reason)
            kind = "chat.completion"
        else:
            choice = Choice(
                text=message.content or "", logprobs=self._text_logprobs(), finish_reason=self._finish_reason
            )
            kind = "text_completion"
        return _encode(self._response(kind, (choice,), _usage(reply)))

    def events(self, *, usage: bool) -> Iterator[bytes]:
        """The chunks of a streamed response, as server-sent events; the last two carry the finish reason and the usage."""
        nothing = None if usage else UNSET
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        for choice in self._chunks():
            yield _event(self._response(kind, (choice,), nothing))
        if usage:
            yield _event(self._response(kind, (), _usage(self._reply)))
        yield DONE

    def _chunks(self) -> Iterator[Choice]:
        message = self._reply.message
        if not self._chat:
            yield Choice(text=message.content or "", logprobs=self._text_logprobs(), finish_reason=self._finish_reason)
            return
        yield Choice(delta=Delta(role="assistant", content=""))
        if message.reasoning_content:
            yield Choice(delta=Delta(reasoning_content=message.reasoning_content))
        logprobs = self._chat_logprobs()
        if message.content or logprobs:
            yield Choice(delta=Delta(content=message.content or ""), logprobs=logprobs)
        if message.tool_calls:
            yield Choice(delta=Delta(tool_calls=_indexed(message.tool_calls)))
        yield Choice(delta=Delta(), finish_reason=self._finish_reason)

    def _response(self, kind: str, choices: tuple[Choice, ...], usage: Usage | UnsetType | None) -> Response:
        coords = self._reply.coords
        return Response(
            id=response_id(coords.call_id, chat=self._chat),
            object=kind,
            created=self._created,
            model=self._model,
            system_fingerprint=f"weights-{coords.weight_spans[-1].version}" if coords.weight_spans else "weights",
            choices=choices,
            usage=usage,
        )

    @property
    def _finish_reason(self) -> FinishReason:
        if self._reply.finish_reason != "stop":
            return "length"  # An aborted call was cut short too; OpenAI has no other word for that.
        return "tool_calls" if self._reply.message.tool_calls else "stop"

    def _chat_logprobs(self) -> ChatLogprobs | None:
        tokens = self._reply.logprobs
        return None if tokens is None else ChatLogprobs(content=[_entry(token) for token in tokens])

    def _text_logprobs(self) -> TextLogprobs | None:
        tokens = self._reply.logprobs
        if tokens is None:
            return None
        offsets = [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(token.token))
        return TextLogprobs(
            tokens=[t.token for t in tokens], token_logprobs=[t.logprob for t in tokens], text_offset=offsets[:-1]
        )


def error_event(body: bytes) -> bytes:
    """An error after a stream has begun: the status is sent already."""
    return b"data: " + body + b"\n\n"


def models(model: str, created: int) -> bytes:
    """The answer to `GET /v1/models`."""
    listed = {"id": model, "object": "model", "created": created, "owned_by": "monoloop"}
    return _encode({"object": "list", "data": [listed]})


def _usage(reply: CallReply) -> Usage:
    prompt, completion = reply.prompt_tokens, reply.completion_tokens
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


def _indexed(calls: Sequence[ToolCall]) -> list[_IndexedToolCall]:
    return [_IndexedToolCall(index=i, id=call.id, function=call.function) for i, call in enumerate(calls)]


def _entry(token: TokenLogprob) -> TokenEntry:
    # A token that is part of a character has no text of its own; its bytes are unknown here.
    known = "\ufffd" not in token.token
    return TokenEntry(token=token.token, logprob=token.logprob, bytes=list(token.token.encode()) if known else None)


def _event(response: Response) -> bytes:
    return b"data: " + _encode(response) + b"\n\n"
