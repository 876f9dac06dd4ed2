"""What an in-loop rollout is given: `chat` goes to the gate by a plain call, with the run's sampling parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from controller.config.schema import RolloutConfig
from ledger.gate import Gate
from ledger.records import Message, Sampling
from workers.environments.base import ChatAnswer


class BadMessages(Exception):
    """An environment passed `chat` something that is not a list of chat messages."""


class InLoopContext:
    """One rollout's `RolloutContext`. Seeds derive from the run's seed and the call's place."""

    def __init__(self, rollout_id: str, *, gate: Gate, sampling: RolloutConfig, seed: int) -> None:
        self._rollout_id = rollout_id
        self._gate = gate
        self._sampling = sampling
        self._seed = seed
        self._calls = 0
        self.terminal: str | None = None
        """The call that the environment declared as the end."""

    @property
    def rollout_id(self) -> str:
        return self._rollout_id

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> ChatAnswer:
        """See `RolloutContext.chat`."""
        limit = self._sampling.max_tokens
        if max_tokens is not None and max_tokens < 1:
            raise BadMessages(f"chat(max_tokens={max_tokens!r}): at least 1 token must be allowed")
        seed = hashlib.sha256(f"{self._seed}/{self._rollout_id}/{self._calls}".encode()).digest()
        self._calls += 1
        reply = await self._gate.chat(
            self._rollout_id,
            _messages(messages),
            tools=tuple(dict(t) for t in tools),
            sampling=Sampling(
                max_tokens=limit if max_tokens is None else min(limit, max_tokens),
                temperature=self._sampling.temperature,
                top_p=self._sampling.top_p,
                top_k=self._sampling.top_k,
                stop_token_ids=self._sampling.stop_token_ids,
                seed=int.from_bytes(seed[:8], "big") >> 1,
            ),
        )
        return ChatAnswer(
            call_id=reply.coords.call_id,
            message=reply.message,
            finish_reason=reply.finish_reason,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
        )

    def declare_terminal(self, call_id: str) -> None:
        """See `RolloutContext.declare_terminal`. The last declaration counts; it is recorded when the rollout ends."""
        self.terminal = call_id


def _messages(messages: Sequence[Message | Mapping[str, Any]]) -> tuple[Message, ...]:
    try:
        out = msgspec.convert([msgspec.to_builtins(m) for m in messages], tuple[Message, ...])
    except (msgspec.ValidationError, TypeError) as e:
        raise BadMessages(f"chat(messages=...): {e}") from e
    if not out:
        raise BadMessages("chat(messages=...): at least one message is needed")
    return out
