"""A rollout context whose model says what the test tells it to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ledger.records import Message
from workers.environments.base import ChatAnswer


class ScriptedContext:
    """Answers each call with `answer(messages)` and keeps the messages of every call."""

    rollout_id = "rollout-0"

    def __init__(self, answer: Callable[[list[Message]], str | None]) -> None:
        self._answer = answer
        self.calls: list[list[Message]] = []

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> ChatAnswer:
        typed = [m if isinstance(m, Message) else msgspec.convert(m, Message) for m in messages]
        self.calls.append(typed)
        return ChatAnswer(
            call_id=f"{self.rollout_id}/{len(self.calls) - 1}",
            message=Message(role="assistant", content=self._answer(typed)),
            finish_reason="stop",
            prompt_tokens=1,
            completion_tokens=1,
        )

    def declare_terminal(self, call_id: str) -> None:
        raise AssertionError("not expected of an environment with one conversation")
