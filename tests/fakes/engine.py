"""A generation worker's inside without a model: an engine that takes its time for each token, and a byte-wise template.

Custody is real: the worker's own `Capture` renders, stages and proves. The engine remembers what it emitted, so that a test
can say of every trained token who sampled it, when and with which probability.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import anyio
import numpy as np
import numpy.typing as npt

from dataplane.plane import DataPlane
from ledger.records import FinishReason, Message, Sampling, WeightSpan
from tests.fakes.process import Handlers, Life
from workers.generation import api
from workers.generation.capture import Capture
from workers.generation.engine import EngineDead, EngineStats, Generation
from workers.generation.rendering import ChatRenderer
from workers.rpc.errors import HandlerError
from workers.rpc.method import Empty

END_OF_TURN = 256
ROLES = {"system": 257, "user": 258, "assistant": 259, "tool": 260}
VOCAB_SIZE = 261
MAX_MODEL_LEN = 8192


class ByteRenderer:
    """A chat template over bytes: role, text, end of turn. It stands for a `ChatRenderer`."""

    stop_token_ids = (END_OF_TURN,)

    async def render_root(self, messages: Sequence[Message], tools: object = ()) -> list[int]:
        return [*(token for message in messages for token in _turn(message)), ROLES["assistant"]]

    async def extend(
        self,
        so_far: npt.NDArray[np.int64],
        prompt_len: int,
        messages: Sequence[Message],
        covered: int,
        tools: object = (),
    ) -> list[int]:
        tokens: list[int] = so_far.tolist()
        end = [] if len(tokens) > prompt_len and tokens[-1] == END_OF_TURN else [END_OF_TURN]
        return [*tokens, *end, *(await self.render_root(messages[covered:]))]

    async def parse(
        self, prompt: Sequence[int], completion: Sequence[int], tools: object = (), *, tool_calls: bool = True
    ) -> Message:
        return Message(role="assistant", content=bytes(t for t in completion if t < END_OF_TURN).decode("latin-1"))


def _turn(message: Message) -> list[int]:
    return [ROLES[message.role], *(message.content or "").encode("latin-1", "replace"), END_OF_TURN]


class _Request:
    def __init__(self, begun: float, length: int) -> None:
        self.begun = begun
        self.length = length
        self.changes: list[tuple[int, int]] = []
        """(index, version): from this token on, sampled under that version."""
        self.aborted = False


class FakeEngine:
    """An `Engine` in what a capture needs of one. `length(rng, max_tokens)` is how long a completion becomes, `token_s` what
    a token takes."""

    vocab_size = VOCAB_SIZE
    max_model_len = MAX_MODEL_LEN

    def __init__(
        self,
        life: Life,
        *,
        token_s: float,
        length: Callable[[random.Random, int], int],
        max_batch: int = 256,
        load_s: float = 0.1,
        memory: dict[str, list[tuple[list[int], Generation]]] | None = None,
    ) -> None:
        """`memory` gets, by rollout, each prompt with what was emitted after it."""
        self.weight_version = 0
        self.spoils: Callable[[random.Random, Generation], Generation] = lambda rng, generation: generation
        self.refuses_weights: Callable[[], bool] = lambda: False
        self._life = life
        self._token_s = token_s
        self._length = length
        self._load_s = load_s
        self._memory = memory
        self._places = anyio.CapacityLimiter(max_batch)
        self._requests: dict[str, _Request] = {}
        self._stops = 0
        """Reasons to stand still at present: paused, loading weights, wedged."""
        self.wedged = False
        self._progress, self._at, self._pace = 0.0, anyio.current_time(), 1 / token_s
        self._changed = anyio.Event()
        self._emitted = 0
        self._dead = anyio.Event()

    async def generate(self, request_id: str, prompt: Sequence[int], sampling: Sampling, **_: Any) -> Generation:
        if not prompt or len(prompt) >= self.max_model_len or request_id in self._requests:
            raise ValueError(f"request {request_id!r} with {len(prompt)} tokens cannot be run")
        rng = random.Random(f"{sampling.seed}/{request_id}/{self._life.process.name}/{self._life.number}")
        limit = min(sampling.max_tokens, self.max_model_len - len(prompt))
        length = max(1, min(limit, self._length(rng, limit)))
        request = _Request(math.inf, length)
        self._requests[request_id] = request
        try:
            async with self._places:
                request.begun = self.progress
                request.changes = [(0, self.weight_version)]
                await self._decode(request)
        finally:
            del self._requests[request_id]
            self._emitted += self._tokens_of(request)
        generation = self.spoils(rng, _sampled(rng, request, self._tokens_of(request), limit))
        if self._memory is not None:
            self._memory.setdefault(request_id.partition("/")[0], []).append((list(prompt), generation))
        return generation

    @property
    def progress(self) -> float:
        """Tokens that a request would have got that has been running since the engine began."""
        return self._progress + (anyio.current_time() - self._at) * self._pace

    def set_pace(self) -> None:
        """To be called when something changed that its speed depends on."""
        self._progress, self._at = self.progress, anyio.current_time()
        still = self._stops or self.wedged or self._life.process.frozen
        self._pace = 0.0 if still else 1 / (self._token_s * self._life.process.slowness)
        self._wake()

    def die(self) -> None:
        self._dead.set()
        self._wake()

    async def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            self._requests[request_id].aborted = True
            self._wake()

    async def pause(self) -> None:
        self._stops += 1
        self.set_pace()

    async def resume(self) -> None:
        self._stops -= 1
        self.set_pace()

    async def load_weights(self, version: int) -> None:
        """Raises ValueError, and keeps the old ones, where it is told to refuse them."""
        self._require_alive()
        await self.pause()
        try:
            await self._life.process.spend(self._load_s)
            if self.refuses_weights():
                raise ValueError(f"version {version} does not hold the model's tensors")
            self.weight_version = version
            for request in self._requests.values():
                if request.begun < math.inf:
                    request.changes.append((self._tokens_of(request), version))
        finally:
            await self.resume()

    def stats(self) -> EngineStats:
        running = [r for r in self._requests.values() if r.begun < math.inf]
        return EngineStats(
            running=len(running),
            waiting=len(self._requests) - len(running),
            kv_usage=min(1.0, len(running) / self._places.total_tokens),
            generated_tokens=self._emitted + sum(self._tokens_of(r) for r in running),
            weight_version=self.weight_version,
        )

    async def _decode(self, request: _Request) -> None:
        while not request.aborted:
            self._require_alive()
            left = request.begun + request.length - self.progress
            if left <= 1e-6:
                return
            if self._pace:
                with anyio.move_on_after(left / self._pace):
                    await self._changed.wait()
            else:
                await self._changed.wait()

    def _tokens_of(self, request: _Request) -> int:
        if request.begun == math.inf:
            return 0
        return max(0, min(request.length, math.floor(self.progress - request.begun + 1e-6)))

    def _require_alive(self) -> None:
        if self._dead.is_set():
            raise EngineDead("it died, as it was told")

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


def _sampled(rng: random.Random, request: _Request, n: int, limit: int) -> Generation:
    tokens = list(rng.choices(range(97, 123), k=n))
    finish: FinishReason = "abort" if n < request.length else "length" if n == limit else "stop"
    if finish == "stop" and tokens:
        tokens[-1] = END_OF_TURN
    starts = [*request.changes, (n, 0)]
    spans = tuple(WeightSpan(version, start, end) for (start, version), (end, _) in pairwise(starts) if start < end)
    return Generation(
        token_ids=tokens,
        logprobs=[float(np.float32(-rng.random() * 5)) for _ in tokens],
        finish_reason=finish,
        weight_spans=spans,
    )


def heavy_tailed(median: float, sigma: float = 1.0) -> Callable[[random.Random, int], int]:
    """Log-normal completion lengths with this median."""
    return lambda rng, limit: round(rng.lognormvariate(math.log(median), sigma))


def generation_handlers(engine: FakeEngine, plane: DataPlane) -> Handlers:
    """What a generation worker answers with, the engine and the data plane being these."""

    async def abort(request: api.Abort) -> Empty:
        await engine.abort(request.call_id)
        return Empty()

    async def load_weights(request: api.LoadWeights) -> api.WeightsLoaded:
        try:
            await engine.load_weights(request.version)
        except ValueError as error:
            raise HandlerError("bad_weights", str(error)) from error
        except EngineDead as error:
            raise HandlerError(error.kind, str(error), retryable=True) from error
        return api.WeightsLoaded(version=engine.weight_version, seconds=0.0)

    async def info(_: Empty) -> api.WorkerInfo:
        return api.WorkerInfo(
            max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, weight_version=engine.weight_version, engine="fake"
        )

    async def stats(_: Empty) -> EngineStats:
        return engine.stats()

    return {
        api.GENERATE.name: Capture(cast(Any, engine), cast(ChatRenderer, ByteRenderer()), plane).answer,
        api.ABORT.name: abort,
        api.LOAD_WEIGHTS.name: load_weights,
        api.INFO.name: info,
        api.STATS.name: stats,
    }
