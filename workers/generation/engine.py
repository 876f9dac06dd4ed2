"""The Engine protocol: tokens in, tokens out, with the sampled tokens' logprobs and weight versions.

Captures are engine-independent: whatever implements this can be trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from msgspec import Struct

from ledger.records import FinishReason, Sampling, WeightSpan


@dataclass(frozen=True)
class Generation:
    """What an engine sampled for one request.

    `token_ids` includes the stop token when one ended it. `logprobs[i]` is the natural log of token i's probability under
    the distribution it was sampled from (after temperature, top-k and top-p). `weight_spans` cover the tokens without gap.
    `routed_experts` is for the prompt's tokens and then the generated ones, in the envelope of `workers.generation.routes`.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_spans: tuple[WeightSpan, ...]
    routed_experts: str | None = None


class EngineDead(Exception):
    """The engine failed or was closed; nothing runs in it any more. `__cause__` is what broke it."""

    kind = "engine_dead"


class EngineRestarting(EngineDead):
    """What was asked is lost, but the engine is coming back: it can be asked again."""

    kind = "engine_restarting"


class EngineStats(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    running: int
    waiting: int
    kv_usage: float
    """Share of the KV cache in use, 0 to 1."""
    generated_tokens: int
    """Since start."""
    weight_version: int
    preemptions: int = 0
    """Requests that had to give up their KV cache to others, since start."""
    restarts: int = 0
    """How often the engine came back from a failure."""
    serving: bool = True
    """False while it is restarting, or came back without the weights it had: load_weights makes it serve again."""


class Engine(Protocol):
    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, in tokens."""
        ...

    @property
    def weight_version(self) -> int:
        """The version of the weights now loaded."""
        ...

    async def generate(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, *, begun: Sequence[int] = ()
    ) -> Generation:
        """Sample one completion, until a stop token, a stop string (whose tokens are kept) or the limit ends it.

        `begun` are tokens that the completion has already, sampled earlier: at most `sampling.max_tokens` more are sampled
        and returned. A stop string may begin among them.

        Cancelling the caller aborts the request; nothing of it stays in the engine.

        The completion is cut at `max_model_len` (finish reason "length"). Raises ValueError for a request that cannot be run
        (a prompt that is empty, too long or out of the vocabulary; sampling that defines no distribution; an id that is
        running), and EngineDead.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request early: its `generate` returns what it has, with finish reason "abort". Unknown ids are ignored."""
        ...

    async def pause(self) -> None:
        """Return when no step is running; running requests keep their place and new ones queue."""
        ...

    async def resume(self) -> None: ...

    async def load_weights(self, path: Path, version: int) -> None:
        """Replace the weights between two steps; running requests go on under the new version (their KV is recomputed).

        `path` is a safetensors file with exactly the model's tensors. Raises ValueError, and keeps the old weights, when a
        name, shape or dtype differs.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def watch(self) -> NoReturn:
        """Raise EngineDead once the engine has failed or was closed; until then, wait."""
        ...

    async def aclose(self) -> None:
        """Abort everything and free the model. Idempotent, bounded."""
        ...
