"""A generation worker for tests: it renders, samples at random, stages and answers as a real one does, without a model.

It blocks or fails where it is told to.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ledger import ids
from ledger.digests import call_digest, call_extras, chain_hash, cumulative_hash, extras_digest, routes_digest
from ledger.records import CallCoords, CallReply, CallRequest, FinishReason, Message, Routes, Sampling, WeightSpan

SAMPLING = Sampling(max_tokens=8)
Conversation = tuple[Message, ...]


def system(text: str) -> Message:
    return Message(role="system", content=text)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


@dataclass(frozen=True)
class Row:
    token_ids: np.ndarray
    token_mask: np.ndarray
    logprobs: np.ndarray
    weight_versions: np.ndarray
    routed_experts: np.ndarray | None = None


def render(messages: Sequence[Message]) -> list[int]:
    """Some token ids for a prompt: never the same for different messages."""
    return [token for m in messages for token in (1_000 + "suat".index(m.role[0]), *map(ord, m.content or ""), 2)] + [1]


class Worker:
    """`rows` is the staging partition. `version` is the weight version that it serves."""

    def __init__(self, seed: int = 0) -> None:
        self.rows: dict[str, Row] = {}
        self.tokens: dict[str, list[int]] = {}
        """Call id -> the whole conversation's tokens, as the worker holds it to be."""
        self.version = 0
        self.say: str | None = None
        """The next answers' text; None makes one up."""
        self.generated: int | None = None
        """How many tokens the next answers have; None makes it up."""
        self.routes: tuple[int, int] | None = None
        """(layers, topk) of the experts that the next answers were routed to."""
        self._random = random.Random(seed)

    async def generate(self, request: CallRequest) -> CallReply:
        parent = request.parent
        prefix = [] if parent is None else [t for key in parent.staging_keys for t in self.rows[key].token_ids]
        if parent is not None:
            assert cumulative_hash(np.array(prefix)) == parent.cumulative_hash
            assert len(prefix) == parent.cum_len
        carry = render(request.messages[0 if parent is None else parent.messages :])
        text = self.say if self.say is not None else "".join(self._random.choices("abcdef", k=6))
        n = self.generated if self.generated is not None else self._random.randint(1, 8)
        sampled = [ord(c) for c in (text * 8)[:n]] if self.say is not None else self._random.choices(range(500), k=n)
        spans = self._spans(n)
        delta = np.array([*carry, *sampled], dtype=np.int64)
        mask = np.repeat([0, 1], [len(carry), n]).astype(np.uint8)
        logprobs = np.zeros(len(delta), dtype=np.float32)
        logprobs[len(carry) :] = [-self._random.random() for _ in range(n)]
        versions = np.full(len(delta), spans[0].version if spans else self.version, dtype=np.int64)
        for span in spans:
            versions[len(carry) + span.start : len(carry) + span.end] = span.version
        self.tokens[request.call_id] = [*map(int, prefix), *map(int, delta)]
        experts = None
        if self.routes is not None:
            size = len(delta) * self.routes[0] * self.routes[1]
            experts = np.array(self._random.choices(range(-1, 64), k=size), dtype=np.int16)
        row = Row(delta, mask, logprobs, versions, experts)
        reply = answer(
            request,
            row,
            carry_len=len(carry),
            spans=spans,
            text=text,
            tokens=self.tokens[request.call_id],
            routes=self.routes,
        )
        self.rows[reply.coords.staging_key] = row
        return reply

    def _spans(self, n: int) -> tuple[WeightSpan, ...]:
        if n == 0:
            return ()
        if n == 1 or self._random.random() < 0.5:
            return (WeightSpan(version=self.version, start=0, end=n),)
        cut = self._random.randint(1, n - 1)
        return (
            WeightSpan(version=self.version, start=0, end=cut),
            WeightSpan(version=self.version + 1, start=cut, end=n),
        )


def answer(
    request: CallRequest,
    row: Row,
    *,
    carry_len: int,
    spans: tuple[WeightSpan, ...],
    text: str,
    tokens: npt.ArrayLike,
    finish_reason: FinishReason = "stop",
    routes: tuple[int, int] | None = None,
) -> CallReply:
    """The reply whose coordinates prove `row`."""
    parent = request.parent
    prev_len = 0 if parent is None else parent.cum_len
    given = None
    if routes is not None:
        given = Routes(layers=routes[0], topk=routes[1], digest=routes_digest(row.routed_experts))
    extras = extras_digest(call_extras(spans, finish_reason, given))
    chain = chain_hash(None if parent is None else parent.chain_hash, row.token_ids)
    cumulative = cumulative_hash(np.array(tokens, dtype=np.int64))
    digest = call_digest(
        rollout_id=request.rollout_id,
        call_id=request.call_id,
        parent_call_id=None if parent is None else parent.call_id,
        prev_len=prev_len,
        weight_version=spans[0].version if spans else int(row.weight_versions[0]),
        token_ids=row.token_ids,
        token_mask=row.token_mask,
        logprobs=row.logprobs,
        extras_digest=extras,
        chain_hash=chain,
        cumulative_hash=cumulative,
    )
    coords = CallCoords(
        call_id=request.call_id,
        parent_call_id=None if parent is None else parent.call_id,
        staging_key=ids.staging_key(request.call_id, digest),
        prev_len=prev_len,
        carry_len=carry_len,
        delta_len=len(row.token_ids),
        weight_spans=spans,
        digest=digest,
        extras_digest=extras,
        chain_hash=chain,
        cumulative_hash=cumulative,
        routes=given,
    )
    return CallReply(
        coords=coords,
        message=assistant(text),
        finish_reason=finish_reason,
        prompt_tokens=prev_len + carry_len,
        completion_tokens=len(row.token_ids) - carry_len,
    )


def altered(row: Row, **columns: np.ndarray) -> Row:
    return replace(row, **columns)
