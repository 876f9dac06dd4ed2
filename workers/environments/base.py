"""What an environment is: it yields prompts and plays rollouts, and never sees tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from ledger.records import FinishReason, Message

LARGEST_REWARD = 1e12
"""In size. Beyond it sums of squares in float32, such as a gradient's norm, overflow."""


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

    @property
    def base_url(self) -> str:
        """For agents over HTTP: the `base_url` of an OpenAI client that speaks for this rollout. Calls over it and by `chat`
        go through the same gate."""
        ...

    @property
    def api_key(self) -> str:
        """The `api_key` that goes with it. It opens this rollout and no other."""
        ...

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
        """Name the call whose conversation is to be trained, by its id or by its response's id. Needed only when a rollout
        has several conversations."""
        ...


class Tokens(Struct, frozen=True, kw_only=True):
    """One rollout's tokens, sampled by the environment itself; all sequences of one length, at least 2."""

    input_ids: Sequence[int]
    loss_mask: Sequence[int]
    """1 on the tokens that the policy generated, 0 on all others; the first token has none before it and so is 0."""
    logprobs: Sequence[float]
    """Natural log of each generated token's probability under the distribution it was sampled from."""
    weight_versions: Sequence[int]
    """The weights that each token was generated with."""


class RolloutResult(Struct, frozen=True, kw_only=True):
    reward: float
    """Finite, and of at most `LARGEST_REWARD` in size."""
    metrics: Mapping[str, float] = {}
    """Extra numbers to average into the step's metrics, e.g. {"exact": 1.0}."""
    scored: str | None = None
    """The text of the answer that was scored, if one was: where a rollout has several conversations, it picks one."""
    tokens: Tokens | None = None
    """Only with `token_capture.enabled: false`, and needed then; nothing proves them."""


class Environment(Protocol):
    """An environment runs in the controller's loop: `rollout` must not block (give CPU-heavy scoring to
    `workers.environments.offload`). One that offers an evaluation is an `Evaluable` too.

    It may have a method `async def health(self) -> None`, asked again and again, that raises while it cannot play."""

    def prompts(self, seed: int) -> Iterator[Prompt]:
        """The run's prompts, in order; the same seed gives the same sequence (a resume skips what was consumed).

        It may be endless; a finite one ends the run when it is exhausted. It is drawn in a thread.
        """
        ...

    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        """Play one rollout of `prompt` and score it. The reward must be finite."""
        ...


class Evaluable(Protocol):
    """What an environment needs beside, to be evaluated during a run (`evaluation.questions`)."""

    def held_out(self, seed: int) -> Iterator[Prompt]:
        """Distinct prompts that `prompts` never yields, whatever its seed; the same seed gives the same sequence.

        They are drawn in a thread before the run starts. Raises ValueError, saying what to set, when none are set aside.
        """
        ...
