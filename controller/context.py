"""What a rollout is given to reach the model: `chat` goes to the gate by a plain call, agents of its own over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
from msgspec.structs import replace

from ledger.gate import Gate
from ledger.ids import call_of
from ledger.records import Message, Sampling
from workers.environments.base import ChatAnswer

_FAILED_PAUSE_S = 0.1
"""Before a failure is told: code that catches it and calls again at once would get nothing but failures, and all the CPU."""


class BadMessages(Exception):
    """An environment passed `chat` something that is not a list of chat messages."""


class InLoopContext:
    """One rollout's `RolloutContext`. `sampling` is the run's own; `base_url` and `api_key` are this rollout's."""

    def __init__(self, rollout_id: str, *, gate: Gate, sampling: Sampling, base_url: str, api_key: str) -> None:
        self._rollout_id = rollout_id
        self._gate = gate
        self._sampling = sampling
        self._base_url = base_url
        self._api_key = api_key
        self._closed = False
        self._calls: set[anyio.CancelScope] = set()
        self.terminal: str | None = None
        """The call that the environment declared as the end."""

    @property
    def rollout_id(self) -> str:
        return self._rollout_id

    @property
    def base_url(self) -> str:
        return self._base_url

    @property
    def api_key(self) -> str:
        return self._api_key

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> ChatAnswer:
        """See `RolloutContext.chat`. Once the context is closed it does not return."""
        if not self._closed:
            await anyio.lowlevel.checkpoint_if_cancelled()
        call = anyio.CancelScope()
        self._calls.add(call)
        try:
            with call:
                if not self._closed:
                    return await self._chat(messages, tools, max_tokens)
        except Exception:
            await anyio.sleep(_FAILED_PAUSE_S)
            raise
        finally:
            self._calls.discard(call)
        # Deaf to cancellations too: code that swallows them would only come back.
        with anyio.CancelScope(shield=True):
            await anyio.sleep_forever()
        raise AssertionError("unreachable")

    def close(self) -> None:
        """The rollout is over: end its calls, and let no further one return."""
        self._closed = True
        for call in tuple(self._calls):
            call.cancel()

    async def _chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int | None,
    ) -> ChatAnswer:
        limit = self._sampling.max_tokens
        if max_tokens is not None and max_tokens < 1:
            raise BadMessages(f"chat(max_tokens={max_tokens!r}): at least 1 token must be allowed")
        reply = await self._gate.chat(
            self._rollout_id,
            _messages(messages),
            tools=tuple(dict(t) for t in tools),
            sampling=replace(self._sampling, max_tokens=limit if max_tokens is None else min(limit, max_tokens)),
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
        self.terminal = call_of(call_id)


def _messages(messages: Sequence[Message | Mapping[str, Any]]) -> tuple[Message, ...]:
    try:
        out = msgspec.convert([msgspec.to_builtins(m) for m in messages], tuple[Message, ...])
    except (msgspec.ValidationError, TypeError) as e:
        raise BadMessages(f"chat(messages=...): {e}") from e
    if not out:
        raise BadMessages("chat(messages=...): at least one message is needed")
    return out
