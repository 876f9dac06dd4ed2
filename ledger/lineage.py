"""Which earlier call a new call continues, decided by content: tools, roles, texts and tool calls, never by guess.

A conversation's fingerprint is a hash chain over its messages, so one pass over a request gives both the fingerprint of its
history (up to its last assistant message) and its own; a continuation costs one look-up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ledger.records import Message

_DOMAIN = b"monoloop-conversation-v1"
_PROMPT_DOMAIN = b"monoloop-prompt-v1"
_json = msgspec.json.Encoder(order="sorted")


class Fingerprint(Struct, frozen=True, kw_only=True):
    """A request's fingerprints, SHA-256 in hex."""

    history: str | None
    """Of the messages up to and including the last assistant message; None without one."""
    history_messages: int
    request: str
    """Of all messages."""
    messages: int


def fingerprint(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Fingerprint:
    """Fingerprint a request.

    Equal are: absent and empty content, tool-call arguments that are the same JSON, tools with reordered keys. Reasoning is
    left out, because clients of the OpenAI API commonly drop it: a continuation has the parent's exact tokens in its context
    whether or not it repeats the reasoning.
    """
    state = hashlib.sha256(_DOMAIN + _json.encode(list(tools))).hexdigest()
    history, history_messages = None, 0
    for count, message in enumerate(messages, start=1):
        state = extend(state, message)
        if message.role == "assistant":
            history, history_messages = state, count
    return Fingerprint(history=history, history_messages=history_messages, request=state, messages=len(messages))


def fingerprint_prompt(prompt: str | Sequence[int]) -> Fingerprint:
    """Fingerprint a text or token ids that are completed without a chat template: always a root, and never continued."""
    request = hashlib.sha256(_PROMPT_DOMAIN + _json.encode(prompt)).hexdigest()
    return Fingerprint(history=None, history_messages=0, request=request, messages=0)


def extend(state: str, message: Message) -> str:
    """The fingerprint of a conversation that has the fingerprint `state` and then `message`."""
    calls = [(call.id, call.function.name, _canonical(call.function.arguments)) for call in message.tool_calls]
    fields = (state, message.role, message.content or "", calls, message.tool_call_id, message.name)
    return hashlib.sha256(_json.encode(fields)).hexdigest()


def _canonical(arguments: str) -> str:
    try:
        return _json.encode(msgspec.json.decode(arguments)).decode()
    except (msgspec.DecodeError, RecursionError):
        return arguments  # What the model wrote is not JSON: it stands for itself.
