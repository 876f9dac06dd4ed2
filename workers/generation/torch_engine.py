"""A continuous-batching engine on a Hugging Face causal LM: requests join and leave between two steps.

All torch work happens in one thread, which owns model, KV cache and scheduler; the event loop only sends it commands and
waits. The thread sleeps on a condition when it has nothing to do. Should it fail, every caller gets the cause at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import anyio
import numpy as np
import torch

from ledger.records import Sampling
from workers.generation import sampling as draw
from workers.generation.api import EngineSpec
from workers.generation.engine import EngineDead, EngineStats, Generation
from workers.generation.model_runner import ModelRunner
from workers.generation.scheduler import Request, Scheduler
from workers.generation.stop_text import Decode, StopText

T = TypeVar("T")

_PROMPT_TOKENS_PER_STEP = 8192
_CLOSE_SECONDS = 30.0


class TorchEngine:
    """An `Engine`. Make one with `TorchEngine.start`, on the event loop that will use it."""

    @classmethod
    async def start(
        cls,
        model_path: Path,
        spec: EngineSpec,
        *,
        stop_token_ids: Collection[int] = (),
        seed: int = 0,
        decode: Decode | None = None,
    ) -> TorchEngine:
        """Load the model, in the compute thread. `stop_token_ids` end every request; `seed` serves requests without one.
        `decode` finds stop strings; without it they are refused.

        Raises StartupError when the model cannot be served. A cancellation leaves a thread that ends once loading does.
        """
        engine = cls(spec, stop_token_ids, seed, decode)
        threading.Thread(target=engine._run, args=(model_path,), name="torch-engine", daemon=True).start()
        try:
            await engine._outcome(engine._loaded)
        except BaseException:
            engine._close()
            raise
        return engine

    def __init__(self, spec: EngineSpec, stop_token_ids: Collection[int], seed: int, decode: Decode | None) -> None:
        self._spec = spec
        self._stop = frozenset(stop_token_ids)
        self._decode = decode

        # Of the event loop.
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._exited = anyio.Event()
        self._pending: set[asyncio.Future[Any]] = set()
        self._requests: dict[str, Request] = {}
        self._seeds = np.random.default_rng(seed)
        self._dead: BaseException | None = None

        # Of both, under the condition.
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []

        # Of the compute thread; the loop reads the numbers.
        self._runner: ModelRunner
        self._scheduler = Scheduler(max_rows=spec.max_batch, max_prompt_tokens=_PROMPT_TOKENS_PER_STEP)
        self._futures: dict[Request, asyncio.Future[Generation]] = {}
        self._batch: draw.SamplingBatch | None = None
        self._paused = self._closing = False
        self._vocab_size = self._max_model_len = 0
        self._version = self._generated = self._running = self._held_tokens = 0

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def weight_version(self) -> int:
        return self._version

    async def generate(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, *, begun: Sequence[int] = ()
    ) -> Generation:
        """See `Engine.generate`. A seeded request's tokens do not depend on what else runs, up to numerics."""
        self._check_alive()
        draw.check(sampling, self._vocab_size)
        tokens = [*prompt, *begun]
        if not 1 <= len(tokens) < self._max_model_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens; allowed are 1 to {self._max_model_len - 1} (max_model_len - 1)"
            )
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is running already")
        if sampling.stop and self._decode is None:
            raise ValueError("this engine was started without a decoder, which stop strings need")
        seed = sampling.seed if sampling.seed is not None else int(self._seeds.integers(1 << 63))
        request = Request(
            request_id=request_id,
            tokens=tokens,
            begun=len(begun),
            sampling=sampling,
            max_len=min(len(tokens) + sampling.max_tokens, self._max_model_len),
            stop=self._stop.union(sampling.stop_token_ids),
            rng=np.random.default_rng(seed % (1 << 64)),
            stop_text=StopText(self._decode, sampling.stop) if self._decode and sampling.stop else None,
        )
        future: asyncio.Future[Generation] = self._loop.create_future()
        self._requests[request_id] = request
        self._post(lambda: self._add(request, future))
        try:
            return await self._outcome(future)
        finally:
            del self._requests[request_id]
            if not future.done() or future.cancelled():
                self._post(lambda: self._end([request]))

    async def abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._post(lambda: self._end([request]))

    async def pause(self) -> None:
        """See `Engine.pause`. A pause that is cancelled is taken back."""
        try:
            await self._call(lambda: self._set_paused(True))
        except anyio.get_cancelled_exc_class():
            self._post(lambda: self._set_paused(False))
            raise

    async def resume(self) -> None:
        await self._call(lambda: self._set_paused(False))

    async def load_weights(self, path: Path, version: int) -> None:
        """See `Engine.load_weights`. A load that is cancelled may still take effect: `weight_version` tells."""
        await self._call(lambda: self._load(path, version))

    def stats(self) -> EngineStats:
        running = self._running
        return EngineStats(
            running=running,
            waiting=max(len(self._requests) - running, 0),
            kv_usage=self._held_tokens / (self._spec.max_batch * self._max_model_len),
            generated_tokens=self._generated,
            weight_version=self._version,
        )

    async def watch(self) -> NoReturn:
        await self._exited.wait()
        raise _obituary(self._dead)

    async def aclose(self) -> None:
        """See `Engine.aclose`. A thread that is stuck in a step is left behind after 30 s."""
        self._close()
        with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
            await self._exited.wait()
        self._die(EngineDead("the engine was closed"))

    # On the event loop.

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise _obituary(self._dead)

    def _post(self, command: Callable[[], None]) -> None:
        """Have the compute thread run `command` before its next step."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    async def _call(self, work: Callable[[], Exception | None]) -> None:
        """Have the compute thread do `work` before its next step and wait; raises what it returns."""
        self._check_alive()
        future: asyncio.Future[None] = self._loop.create_future()

        def command() -> None:
            error = work()
            self._tell(_resolve, future, None) if error is None else self._tell(_fail, future, error)

        self._post(command)
        await self._outcome(future)

    async def _outcome(self, future: asyncio.Future[T]) -> T:
        """Wait for the compute thread's answer, or its death."""
        self._pending.add(future)
        try:
            return await future
        finally:
            self._pending.discard(future)

    def _close(self) -> None:
        self._dead = self._dead or EngineDead("the engine was closed")
        self._post(self._set_closing)

    def _die(self, cause: BaseException) -> None:
        self._dead = self._dead or cause
        self._running = self._held_tokens = 0
        for future in self._pending:
            _fail(future, _obituary(cause))

    # In the compute thread.

    def _tell(self, callback: Callable[..., object], *args: object) -> None:
        """Have the event loop run `callback`. A loop that is closed has nobody left to tell."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._closing = True

    def _run(self, model_path: Path) -> None:
        try:
            torch.set_num_threads(self._spec.threads)
            with torch.inference_mode():
                try:
                    self._runner = ModelRunner(model_path, self._spec)
                except Exception as error:
                    self._tell(_fail, self._loaded, error)
                    return
                self._vocab_size, self._max_model_len = self._runner.vocab_size, self._runner.max_model_len
                self._tell(_resolve, self._loaded, None)
                self._serve()
        except BaseException as error:
            self._tell(self._die, error)
        finally:
            self._tell(self._exited.set)

    def _serve(self) -> None:
        while not self._closing:
            with self._wake:
                self._wake.wait_for(lambda: self._commands or (self._scheduler.busy and not self._paused))
                commands, self._commands = self._commands, []
            for command in commands:
                command()
            if self._scheduler.busy and not self._paused:
                self._step()
            self._count()
        self._end([*self._scheduler.running, *self._scheduler.waiting])
        del self._runner

    def _step(self) -> None:
        """Admit what fits, and sample one token for every running request."""
        runner, rows = self._runner, self._scheduler.running
        admitted = self._scheduler.admit(self._version)
        if admitted:
            runner.prefill([(row, request.cached) for row, request in admitted])
            self._batch = None
        if self._batch is None:
            self._batch = draw.SamplingBatch.of([r.sampling for r in rows], self._vocab_size, runner.device)
        logits = runner.decode([r.tokens[-1] for r in rows], [len(r.tokens) - 1 for r in rows])
        uniforms = torch.tensor([r.rng.random() for r in rows], dtype=torch.float64, device=runner.device)
        tokens, logprobs = draw.sample(logits, self._batch, uniforms)
        drawn = zip(rows, cast("list[int]", tokens.tolist()), cast("list[float]", logprobs.tolist()), strict=True)
        ended = [request for request, token, logprob in drawn if request.append(token, logprob)]
        self._generated += len(rows)
        if ended:
            self._end(ended)

    def _add(self, request: Request, future: asyncio.Future[Generation]) -> None:
        low, high = min(request.tokens), max(request.tokens)
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            self._tell(_fail, future, ValueError(f"token {bad} is not in the vocabulary (0 to {self._vocab_size - 1})"))
            return
        self._futures[request] = future
        self._scheduler.add(request)

    def _end(self, requests: Sequence[Request]) -> None:
        """Take requests out and answer them with what they have. Those that are out already are ignored."""
        requests = [request for request in requests if request in self._futures]
        moves = self._scheduler.remove(requests)
        if moves:
            length = max(len(self._scheduler.running[target].tokens) for _, target in moves)
            self._runner.copy_rows(moves, length)
        self._batch = None
        answers = [(self._futures.pop(request), request.finish()) for request in requests]
        self._count()
        self._tell(_resolve_all, answers)

    def _count(self) -> None:
        running = self._scheduler.running
        self._running, self._held_tokens = len(running), sum(len(request.tokens) for request in running)

    def _load(self, path: Path, version: int) -> ValueError | None:
        try:
            self._runner.load_weights(path)
        except ValueError as error:
            return error
        self._version = version
        for request in self._scheduler.running:
            request.reweigh(version)
        self._runner.prefill([(row, request.cached) for row, request in enumerate(self._scheduler.running)])
        return None

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _set_closing(self) -> None:
        self._closing = True


def _obituary(cause: BaseException | None) -> EngineDead:
    dead = EngineDead(f"the engine is dead: {cause!r}")
    dead.__cause__ = cause
    return dead


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _resolve_all(answers: Sequence[tuple[asyncio.Future[T], T]]) -> None:
    for future, value in answers:
        _resolve(future, value)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
