"""The records that gate, worker and ledger exchange about a model call. They hold no token arrays.

One call's life: the gate sends a `CallRequest` to a generation worker; the worker renders, generates, stages the tokens
and answers with a `CallReply`, whose `CallCoords` say where the tokens are and what they hash to.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

FinishReason = Literal["stop", "length", "abort"]


class FunctionCall(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    """JSON text, as in the OpenAI API."""


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class Message(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One chat message in the OpenAI shape; `reasoning_content` is what a parser split off as thinking."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


class Sampling(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters of one call. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Extra stop tokens; the model's own end-of-turn tokens always stop."""
    stop: tuple[str, ...] = ()
    """Texts that end the completion. The tokens that spell one are kept and staged; the message is cut before it."""
    seed: int | None = None


class WeightSpan(Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, end) of a call's generated tokens were sampled under weight `version`."""

    version: int
    start: int
    end: int


class Routes(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """What a call's staged `routed_experts` must be: int16 [delta_len, layers * topk], -1 where the engine knew no route."""

    layers: int
    topk: int
    digest: str
    """SHA-256 in hex of the column's little-endian bytes."""


class ParentCoords(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """The committed call that a new call continues: where its tokens are, and what they must hash to."""

    call_id: str
    staging_keys: tuple[str, ...]
    """Root first; concatenating these rows gives the conversation's exact tokens so far."""
    cum_len: int
    chain_hash: str
    cumulative_hash: str
    messages: int
    """How many leading messages of the new request the parent covers (its request plus its answer)."""


class CallRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    rollout_id: str
    call_id: str
    attempt: int = 0
    """How many attempts of this call were given up before; whatever they staged has no answer and is never committed."""
    messages: tuple[Message, ...]
    sampling: Sampling
    tools: tuple[dict[str, Any], ...] = ()
    """OpenAI tool specifications ({"type": "function", "function": {...}})."""
    parse_tool_calls: bool = True
    """False leaves the text of tool calls in the content."""
    prompt: str | tuple[int, ...] | None = None
    """Instead of messages: text or token ids to complete, without a chat template."""
    logprobs: bool = False
    """Whether the reply is to hold the generated tokens' texts and logprobs."""
    parent: ParentCoords | None = None


class CallCoords(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Where a call's token delta was staged, and the digests that prove it (layout: `ledger.digests`)."""

    call_id: str
    parent_call_id: str | None
    staging_key: str
    prev_len: int
    """Tokens inherited from the parent (0 for a root)."""
    carry_len: int
    """New prompt tokens in the delta."""
    delta_len: int
    """carry_len + generated tokens."""
    weight_spans: tuple[WeightSpan, ...]
    """Cover the generated tokens without gap, in order; empty when nothing was generated."""
    digest: str
    extras_digest: str
    chain_hash: str
    cumulative_hash: str
    routes: Routes | None = None
    """Set when the engine said which experts each token was routed to; covered by `extras_digest`."""

    @property
    def cum_len(self) -> int:
        return self.prev_len + self.delta_len


class TokenLogprob(Struct, frozen=True, array_like=True):
    """A generated token as an agent may ask for it; `logprob` is the natural log, under the distribution sampled from."""

    token: str
    logprob: float


class CallReply(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    coords: CallCoords
    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One per generated token, if the request asked for them."""
