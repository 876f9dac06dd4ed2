"""One model call with custody: the exact tokens are staged, and only then is the call answered.

A call that continues another starts from that call's exact tokens, and only after they proved to be those the ledger knows.
Independent of the engine: whatever implements `Engine` is captured alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.errors import DataPlaneError, RowExists, RowGone
from dataplane.plane import DataPlane
from dataplane.schema import STAGING
from dataplane.sink import TokenDelta, TokenSink
from ledger.digests import call_digest, call_extras, chain_hash, cumulative_hash, extras_digest, routes_digest
from ledger.ids import staging_key
from ledger.records import CallCoords, CallReply, CallRequest, Message, ParentCoords, Routes, WeightSpan
from workers.generation.engine import Engine, EngineDead, Generation
from workers.generation.rendering import BadMessages, ChatRenderer
from workers.generation.routes import BadRoutes, decode_routes
from workers.generation.stop_text import cut
from workers.generation.text_bound import TextTooLong
from workers.generation.turn_end import RenderMismatch
from workers.rpc.errors import HandlerError

T = TypeVar("T")
Ids = npt.NDArray[np.int64]

_CACHED_TOKENS = 8_000_000
"""Bound of the prefix cache: 64 MB of token ids."""
_INLINE_TOKENS = 50_000
"""Packing and hashing up to this many tokens takes up to 3 ms and is done on the loop."""
_PIECE_TOKENS = 16_384
"""Packing so many takes 0.3 ms."""


@dataclass(frozen=True)
class Prefix:
    """A conversation's exact tokens so far, with the digests that prove them."""

    ids: Ids
    prompt_len: int
    """The rest is the completion of the last call."""
    chain_hash: str | None
    cumulative_hash: str


_NOTHING = Prefix(np.empty(0, np.int64), 0, None, "")


class Capture:
    """Answers `CallRequest`s. `plane` is where deltas are staged and parents' tokens are read from."""

    def __init__(self, engine: Engine, renderer: ChatRenderer, plane: DataPlane) -> None:
        self._engine = engine
        self._renderer = renderer
        self._plane = plane
        self._sink = TokenSink(plane)
        self._prefixes = _PrefixCache(_CACHED_TOKENS)

    async def answer(self, request: CallRequest) -> CallReply:
        """Render, generate, stage, parse. Raises HandlerError with the failure kinds of `api.GENERATE`.

        A cancellation leaves no request in the engine; a row that was staged by then is an orphan under the call's own key.
        """
        prefix = await self._parent_tokens(request.parent) if request.parent else _NOTHING
        prompt = await self._render(request, prefix)
        generation = await self._generate(request, prompt)
        work = len(prompt) + len(generation.routed_experts or "") // 32
        delta, coords, whole = await _off_loop_when_large(
            work, lambda: _prove(request, prefix, prompt[prefix.ids.size :], generation)
        )
        try:
            await self._stage(coords.staging_key, delta)
        except DataPlaneError as error:
            raise HandlerError("staging_failed", str(error), retryable=True) from error
        self._prefixes.put(coords.staging_key, whole)
        return CallReply(
            coords=coords,
            message=await self._message(request, prompt, generation),
            finish_reason=generation.finish_reason,
            prompt_tokens=len(prompt),
            completion_tokens=len(generation.token_ids),
            logprobs=await self._renderer.plain.logprobs(generation) if request.logprobs else None,
        )

    async def _stage(self, key: str, delta: TokenDelta) -> None:
        try:
            await self._sink.stage(key, delta)
        except RowExists:
            # An attempt of this call that was given up, and can no longer be answered, had sampled the same tokens.
            await self._plane.clear(STAGING, [key])
            await self._sink.stage(key, delta)

    async def _message(self, request: CallRequest, prompt: list[int], generation: Generation) -> Message:
        completion = generation.token_ids
        if request.prompt is None:
            message = await self._renderer.parse(prompt, completion, request.tools, tool_calls=request.parse_tool_calls)
        else:
            message = Message(role="assistant", content=await self._renderer.plain.text(completion))
        return cut(message, request.sampling.stop)

    async def _render(self, request: CallRequest, prefix: Prefix) -> list[int]:
        """The whole prompt; it begins with the prefix."""
        parent = request.parent
        try:
            if request.prompt is not None:
                return await self._raw(request.prompt)
            if parent is None:
                return await self._renderer.render_root(request.messages, request.tools)
            return await self._renderer.extend(
                prefix.ids, prefix.prompt_len, request.messages, parent.messages, request.tools
            )
        except TextTooLong as error:
            raise self._prompt_too_long(f"at least {error.tokens}") from error
        except BadMessages as error:
            raise HandlerError("bad_request", str(error), failure_class="data") from error
        except RenderMismatch as error:
            raise HandlerError("render_mismatch", str(error), failure_class="capture") from error

    async def _raw(self, prompt: str | tuple[int, ...]) -> list[int]:
        return await self._renderer.plain.tokens(prompt) if isinstance(prompt, str) else list(prompt)

    async def _generate(self, request: CallRequest, prompt: list[int]) -> Generation:
        room = self._engine.max_model_len - len(prompt)
        if room < 1:
            raise self._prompt_too_long(str(len(prompt)))
        sampling = msgspec.structs.replace(request.sampling, max_tokens=min(request.sampling.max_tokens, room))
        try:
            generation = await self._engine.generate(_request_id(request), prompt, sampling)
        except ValueError as error:
            raise HandlerError("bad_request", str(error), failure_class="data") from error
        except EngineDead as error:
            raise HandlerError(error.kind, str(error), retryable=True) from error
        if not np.isfinite(np.array(generation.logprobs, np.float32)).all():
            raise HandlerError(
                "bad_logprobs",
                f"weights of version {self._engine.weight_version} gave logprobs that are not finite; are they broken?",
                failure_class="capture",
            )
        return generation

    def _prompt_too_long(self, tokens: str) -> HandlerError:
        return HandlerError(
            "prompt_too_long",
            f"the prompt has {tokens} tokens; with one token to generate at most {self._engine.max_model_len} fit. "
            "Raise generation.max_model_len (and the model's own limit), or keep conversations shorter",
            failure_class="data",
        )

    async def _parent_tokens(self, parent: ParentCoords) -> Prefix:
        """The parent's exact tokens, from the cache or the data plane, proven against its coordinates."""
        key = parent.staging_keys[-1] if parent.staging_keys else ""
        prefix = self._prefixes.get(key) or await self._read(parent)
        problems = [
            f"{what} is {ours}, the ledger has {theirs}"
            for what, ours, theirs in (
                ("length", prefix.ids.size, parent.cum_len),
                ("cumulative_hash", prefix.cumulative_hash, parent.cumulative_hash),
                ("chain_hash", prefix.chain_hash, parent.chain_hash),
            )
            if ours != theirs
        ]
        if problems:
            raise HandlerError(
                "prefix_mismatch", f"tokens of call {parent.call_id}: {'; '.join(problems)}", failure_class="capture"
            )
        self._prefixes.put(key, prefix)
        return prefix

    async def _read(self, parent: ParentCoords) -> Prefix:
        try:
            rows = await self._plane.get(STAGING, parent.staging_keys, ("token_ids", "token_mask"))
        except RowGone as error:
            raise HandlerError("prefix_lost", str(error), failure_class="capture") from error
        except DataPlaneError as error:
            raise HandlerError("prefix_unavailable", str(error), retryable=True) from error
        return await _off_loop_when_large(sum(row["token_ids"].size for row in rows), lambda: _join(rows))


def _request_id(request: CallRequest) -> str:
    """The engine's name for it: a lost attempt may still be running there when the next one comes."""
    return f"{request.call_id}+{request.attempt}" if request.attempt else request.call_id


def _join(rows: list[dict[str, npt.NDArray[Any]]]) -> Prefix:
    """One conversation from its calls' staged rows, root first."""
    chain: str | None = None
    for row in rows:
        chain = chain_hash(chain, row["token_ids"])
    ids = np.concatenate([_NOTHING.ids, *(row["token_ids"] for row in rows)])
    completion = int(np.count_nonzero(rows[-1]["token_mask"])) if rows else 0
    return Prefix(ids, ids.size - completion, chain, cumulative_hash(ids))


def _delta(carry: list[int], generation: Generation) -> TokenDelta:
    generated = len(generation.token_ids)
    n = len(carry) + generated
    mask, logprobs, versions = np.zeros(n, np.uint8), np.zeros(n, np.float32), np.zeros(n, np.int64)
    mask[len(carry) :] = 1
    logprobs[len(carry) :] = generation.logprobs
    versions[: len(carry)] = _first_version(generation.weight_spans)
    for span in generation.weight_spans:
        versions[len(carry) + span.start : len(carry) + span.end] = span.version
    token_ids = np.empty(n, np.int64)
    # Converting a list keeps all threads from running: in pieces, the loop has its turn in between.
    for i in range(0, len(carry), _PIECE_TOKENS):
        piece = carry[i : i + _PIECE_TOKENS]
        token_ids[i : i + len(piece)] = piece
    token_ids[len(carry) :] = generation.token_ids
    return TokenDelta(token_ids, mask, logprobs, versions)


def _first_version(spans: tuple[WeightSpan, ...]) -> int:
    return spans[0].version if spans else 0


def _prove(
    request: CallRequest, prefix: Prefix, carry: list[int], generation: Generation
) -> tuple[TokenDelta, CallCoords, Prefix]:
    """What the call adds, its coordinates, and the conversation as it is after it."""
    delta = _delta(carry, generation)
    ids = np.concatenate([prefix.ids, delta.token_ids])
    generated = len(generation.token_ids)
    whole = Prefix(ids, ids.size - generated, chain_hash(prefix.chain_hash, delta.token_ids), cumulative_hash(ids))
    assert whole.chain_hash is not None
    routed, routes = _routes(generation, ids.size, prefix.ids.size)
    extras = extras_digest(call_extras(generation.weight_spans, generation.finish_reason, routes))
    parent_call_id = None if request.parent is None else request.parent.call_id
    digest = call_digest(
        rollout_id=request.rollout_id,
        call_id=request.call_id,
        parent_call_id=parent_call_id,
        prev_len=prefix.ids.size,
        weight_version=_first_version(generation.weight_spans),
        token_ids=delta.token_ids,
        token_mask=delta.token_mask,
        logprobs=delta.logprobs,
        extras_digest=extras,
        chain_hash=whole.chain_hash,
        cumulative_hash=whole.cumulative_hash,
    )
    coords = CallCoords(
        call_id=request.call_id,
        parent_call_id=parent_call_id,
        staging_key=staging_key(request.call_id, digest),
        prev_len=prefix.ids.size,
        carry_len=delta.token_ids.size - generated,
        delta_len=delta.token_ids.size,
        weight_spans=generation.weight_spans,
        digest=digest,
        extras_digest=extras,
        chain_hash=whole.chain_hash,
        cumulative_hash=whole.cumulative_hash,
        routes=routes,
    )
    return replace(delta, routed_experts=routed), coords, whole


def _routes(generation: Generation, tokens: int, prev_len: int) -> tuple[npt.NDArray[np.int16] | None, Routes | None]:
    """The delta's routed experts as a column, and what they hash to. What is malformed is refused, never dropped."""
    if generation.routed_experts is None:
        return None, None
    try:
        routed = decode_routes(generation.routed_experts, tokens)
    except BadRoutes as error:
        raise HandlerError("bad_routes", str(error), failure_class="capture") from error
    column = routed.experts[prev_len:].ravel()
    return column, Routes(layers=routed.layers, topk=routed.topk, digest=routes_digest(column))


async def _off_loop_when_large(tokens: int, work: Callable[[], T]) -> T:
    return work() if tokens <= _INLINE_TOKENS else await anyio.to_thread.run_sync(work)


class _PrefixCache:
    """The most recently used prefixes, by staging key, up to a number of tokens in all."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._entries: OrderedDict[str, Prefix] = OrderedDict()

    def get(self, key: str) -> Prefix | None:
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: str, prefix: Prefix) -> None:
        previous = self._entries.pop(key, None)
        self._tokens += prefix.ids.size - (previous.ids.size if previous else 0)
        self._entries[key] = prefix
        while self._tokens > self._max_tokens and self._entries:
            self._tokens -= self._entries.popitem(last=False)[1].ids.size
