"""Which requests run, and in which KV row each does. First come, first served; rows in use are always 0..n-1."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise

import numpy as np

from ledger.records import FinishReason, Sampling, WeightSpan
from workers.generation.engine import Generation
from workers.generation.stop_text import StopText


class RequestState(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Request:
    """One completion in the making.

    Of a running request the KV cache holds all tokens but the last, which the next step feeds.
    """

    request_id: str
    tokens: list[int]
    """The prompt, then what was generated."""
    sampling: Sampling
    max_len: int
    """Prompt and completion end at this many tokens."""
    stop: frozenset[int]
    rng: np.random.Generator
    stop_text: StopText | None = None
    begun: int = 0
    """How many of the prompt's last tokens the completion began with."""
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    logprobs: list[float] = field(default_factory=list[float])
    _versions: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(weight version, index of the first generated token under it)."""

    @property
    def cached(self) -> list[int]:
        """The tokens that the KV cache holds while the request runs."""
        return self.tokens[:-1]

    def start(self, version: int) -> None:
        self._move(RequestState.WAITING, RequestState.RUNNING)
        self._versions.append((version, 0))

    def reweigh(self, version: int) -> None:
        """From here on, tokens are sampled under weight `version`."""
        if self.state is not RequestState.RUNNING:
            raise RuntimeError(f"request {self.request_id!r} is {self.state.name}, not RUNNING")
        if self._versions[-1][1] == len(self.logprobs):
            self._versions.pop()
        self._versions.append((version, len(self.logprobs)))

    def append(self, token: int, logprob: float) -> bool:
        """Add a sampled token; True when it ends the request."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop or self._said_to_stop():
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_len:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def finish(self) -> Generation:
        """What was sampled; the finish reason is "abort" when no token ended it."""
        if self.state is RequestState.FINISHED:
            raise RuntimeError(f"request {self.request_id!r} is finished already")
        self.state = RequestState.FINISHED
        done = len(self.logprobs)
        starts = [*self._versions, (0, done)]
        return Generation(
            token_ids=self.tokens[len(self.tokens) - done :],
            logprobs=self.logprobs,
            finish_reason=self.finish_reason or "abort",
            weight_spans=tuple(
                WeightSpan(version, start, end) for (version, start), (_, end) in pairwise(starts) if start < end
            ),
        )

    def _said_to_stop(self) -> bool:
        start = len(self.tokens) - len(self.logprobs) - self.begun
        return self.stop_text is not None and self.stop_text.reached(self.tokens, start)

    def _move(self, old: RequestState, new: RequestState) -> None:
        if self.state is not old:
            raise RuntimeError(f"request {self.request_id!r} is {self.state.name}, not {old.name}")
        self.state = new


class Scheduler:
    """The waiting queue and the running rows. Holds no tensors; the caller moves KV rows as it is told."""

    def __init__(self, *, max_rows: int, max_prompt_tokens: int) -> None:
        """`max_prompt_tokens` bounds the prompts admitted in one step (a longer one is admitted alone)."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """`running[r]` has KV row r."""
        self._max_rows = max_rows
        self._max_prompt_tokens = max_prompt_tokens

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self, version: int) -> list[tuple[int, Request]]:
        """Start the requests that have a place, in order; returns each with its row."""
        admitted: list[tuple[int, Request]] = []
        budget = self._max_prompt_tokens
        while self.waiting and len(self.running) < self._max_rows:
            budget -= len(self.waiting[0].tokens)
            if budget < 0 and admitted:
                break
            request = self.waiting.popleft()
            request.start(version)
            admitted.append((len(self.running), request))
            self.running.append(request)
        return admitted

    def remove(self, requests: Collection[Request]) -> list[tuple[int, int]]:
        """Take requests out, wherever they are; returns the (source, target) row copies that close the gaps.

        Unknown requests are ignored. The copies may be made in any order: no source is another copy's target.
        """
        gone = set(requests)
        if any(request.state is RequestState.WAITING for request in gone):
            self.waiting = deque(request for request in self.waiting if request not in gone)
        gaps = [row for row, request in enumerate(self.running) if request in gone]
        rows = len(self.running) - len(gaps)
        tail = [row for row in range(rows, len(self.running)) if self.running[row] not in gone]
        moves = list(zip(tail, gaps, strict=False))
        for source, target in moves:
            self.running[target] = self.running[source]
        del self.running[rows:]
        return moves
