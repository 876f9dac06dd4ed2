"""New weights under running calls, in one of three modes; in each, a call's tokens, logprobs and spans are exact.

`keep`: calls stay in the engine and go on with the new weights. `drain`: nothing new enters the engine until what is in it
has ended; what has not at the deadline goes on as with `keep`. `abort`: calls are taken out of the engine with the tokens
that they have, and go on from those after the update, with what is left of their budget.

Invariant: while weights are loaded in mode `abort` no call is in the engine; when the load has ended, however it did, every
call that was held or taken out goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import anyio
from msgspec.structs import replace

from ledger.records import Sampling, WeightSpan
from workers.generation.engine import Engine, EngineStats, Generation
from workers.weight_sync.spec import UpdateMode

logger = logging.getLogger(__name__)

_SEED_STEP = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio (Knuth): seeds that are this far apart have nothing in common."""


@dataclass(eq=False)
class _Call:
    inside: bool = False
    """Whether the engine has it."""
    taken_out: bool = False
    """By an update, to go on after it."""
    aborted: bool = False
    """By whoever made it."""


class UpdatingEngine:
    """The `engine`, as an Engine whose weights are updated in mode `mode`."""

    def __init__(self, engine: Engine, mode: UpdateMode, *, drain_timeout_s: float) -> None:
        self._engine = engine
        self._mode: UpdateMode = mode
        self._drain_timeout_s = drain_timeout_s
        self._calls: dict[str, _Call] = {}
        self._held = False
        self._changed = anyio.Event()
        self._updating = anyio.Lock()

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    async def generate(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, *, begun: Sequence[int] = ()
    ) -> Generation:
        """See `Engine.generate`. What a seeded call draws after it was taken out has a seed of its own, made from the call's
        and the number of tokens before."""
        if request_id in self._calls:
            raise ValueError(f"request {request_id!r} is running already")
        call = self._calls[request_id] = _Call()
        so_far = Generation([], [], "abort", ())
        try:
            while await self._admitted(call):
                call.inside, call.taken_out = True, False
                try:
                    part = await self._engine.generate(
                        request_id, prompt, _rest(sampling, len(so_far.token_ids)), begun=[*begun, *so_far.token_ids]
                    )
                finally:
                    call.inside = False
                    self._tell()
                so_far = _joined(so_far, part)
                if part.finish_reason != "abort" or not call.taken_out:
                    break
            return so_far
        finally:
            del self._calls[request_id]

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`. A call that is held, or was taken out, returns at once."""
        call = self._calls.get(request_id)
        if call is not None:
            call.aborted = True
            self._tell()
            await self._engine.abort(request_id)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def load_weights(self, path: Path, version: int) -> None:
        """See `Engine.load_weights`."""
        await self.update(lambda: self._engine.load_weights(path, version))

    async def update(self, load: Callable[[], Awaitable[None]]) -> None:
        """Have `load` change the engine's weights; raises what it does. One update after another."""
        async with self._updating:
            if self._mode == "keep":
                await load()
                return
            with self._holding():
                await (self._drain() if self._mode == "drain" else self._take_out())
                await load()

    def stats(self) -> EngineStats:
        stats = self._engine.stats()
        return replace(stats, waiting=stats.waiting + len(self._calls) - self._inside)

    async def watch(self) -> NoReturn:
        await self._engine.watch()

    async def aclose(self) -> None:
        await self._engine.aclose()

    @property
    def _inside(self) -> int:
        return sum(call.inside for call in self._calls.values())

    async def _admitted(self, call: _Call) -> bool:
        """Wait until the engine takes calls; False when this one was aborted."""
        while self._held and not call.aborted:
            await self._changed.wait()
        return not call.aborted

    @contextmanager
    def _holding(self) -> Generator[None]:
        self._held = True
        try:
            yield
        finally:
            self._held = False
            self._tell()

    async def _drain(self) -> None:
        with anyio.move_on_after(self._drain_timeout_s) as scope:
            await self._emptied()
        if scope.cancelled_caught:
            logger.warning(
                "%d calls had not ended after %g s; they go on with new weights", self._inside, self._drain_timeout_s
            )

    async def _take_out(self) -> None:
        inside = {request_id: call for request_id, call in self._calls.items() if call.inside}
        for request_id, call in inside.items():
            call.taken_out = True
            await self._engine.abort(request_id)
        await self._emptied()

    async def _emptied(self) -> None:
        while self._inside:
            await self._changed.wait()

    def _tell(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


def _rest(sampling: Sampling, done: int) -> Sampling:
    """What is left to sample after `done` tokens."""
    if not done:
        return sampling
    seed = None if sampling.seed is None else (sampling.seed + _SEED_STEP * done) % (1 << 63)
    return replace(sampling, max_tokens=sampling.max_tokens - done, seed=seed)


def _joined(first: Generation, second: Generation) -> Generation:
    done = len(first.token_ids)
    spans = list(first.weight_spans)
    for span in second.weight_spans:
        span = WeightSpan(span.version, span.start + done, span.end + done)
        if spans and spans[-1].version == span.version:
            span = WeightSpan(span.version, spans.pop().start, span.end)
        spans.append(span)
    return Generation(
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        finish_reason=second.finish_reason,
        weight_spans=tuple(spans),
        routed_experts=second.routed_experts,  # of the whole sequence, which the engine was given anew
    )
