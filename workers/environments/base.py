"""What an environment is: it yields prompts and plays rollouts, and never sees tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from ledger.records import FinishReason, Message


class Prompt(Struct, frozen=True, kw_only=True):
    """One task. A prompt group is G rollouts of one prompt."""

    id: str
    """Unique within the run; shown in logs and kept across a resume."""
    data: Any = None
    """Whatever the environment needs to play it; JSON-like values."""


class ChatAnswer(Struct, frozen=True, kw_only=True):
    call_id: str
    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int

    @property
    def text(self) -> str:
        """The answer's content, "" when it has none (a pure tool call)."""
        return self.message.content or ""


class RolloutContext(Protocol):
    """What a rollout is given to talk to the model."""

    @property
    def rollout_id(self) -> str: ...

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> ChatAnswer:
        """Ask the policy for the next assistant message. Sampling parameters come from the config; `max_tokens` may lower
        the configured limit. A call that repeats an earlier call's messages and appends to its answer continues that
        call's exact tokens. Raises when the call fails; the failure then also marks the rollout.
        """
        ...

    def declare_terminal(self, call_id: str) -> None:
        """Name the call whose conversation is to be trained. Needed only when a rollout has several conversations."""
        ...


class RolloutResult(Struct, frozen=True, kw_only=True):
    reward: float
    metrics: Mapping[str, float] = {}
    """Extra numbers to average into the step's metrics, e.g. {"exact": 1.0}."""


class Environment(Protocol):
    """An environment runs in the controller's loop: `rollout` must not block (give CPU-heavy scoring to
    `workers.environments.offload`)."""

    def prompts(self, seed: int) -> Iterator[Prompt]:
        """The run's prompts, in order; the same seed gives the same sequence (a resume skips what was consumed).

        It may be endless; a finite one ends the run when it is exhausted. It is drawn in a thread.
        """
        ...

    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        """Play one rollout of `prompt` and score it. The reward must be finite."""
        ...
