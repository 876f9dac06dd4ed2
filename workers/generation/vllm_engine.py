"""vLLM behind the Engine protocol: tokens in, tokens out, with the logprobs of the distribution they were sampled from.

The engine outlives its core. When the core dies, the calls in it fail as `EngineRestarting`, and another one is forked with
the weights that it served; calls that come meanwhile wait. No token is ever said to be of a version that was not loaded.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import anyio
import anyio.to_thread

from ledger.records import Sampling
from workers.generation import sampling as draw
from workers.generation.api import EngineSpec
from workers.generation.engine import EngineDead, EngineRestarting, EngineStats, Generation
from workers.generation.stop_text import Decode, StopText
from workers.generation.vllm_args import LOWEST_TEMPERATURE, argument_problems, engine_arguments
from workers.generation.vllm_core import Core, CoreDied, CoreStats
from workers.generation.vllm_names import vllm
from workers.generation.vllm_process import preload
from workers.generation.vllm_request import Request, complete, sampling_params
from workers.generation.vllm_weights import WeightsFile, change_weights, load_file, open_checked, wanted_tensors
from workers.host import StartupError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_DEATHS_IN_A_ROW = 3
"""Cores that may die one after another, no call answered in between, before the engine gives up."""
_ABORT_S = 2.0


class _State(Enum):
    SERVING = auto()
    RESTARTING = auto()
    WITHOUT_WEIGHTS = auto()
    """A new core runs with the model directory's weights, since those that were served are gone."""
    CLOSED = auto()


_MOVES = {
    _State.SERVING: {_State.RESTARTING, _State.CLOSED},
    _State.RESTARTING: {_State.SERVING, _State.WITHOUT_WEIGHTS, _State.CLOSED},
    _State.WITHOUT_WEIGHTS: {_State.SERVING, _State.RESTARTING, _State.CLOSED},
    _State.CLOSED: set[_State](),
}


class VLLMEngine:
    """An `Engine`. Make one with `VLLMEngine.start`, on the event loop that will use it. `watch` must run beside it: it is
    what restarts the core."""

    @classmethod
    async def start(
        cls,
        model_path: Path,
        spec: EngineSpec,
        *,
        stop_token_ids: Collection[int] = (),
        seed: int = 0,
        decode: Decode | None = None,
    ) -> VLLMEngine:
        """Import vLLM and start a core, in threads; `vllm_process.prepare_process` comes before.

        `stop_token_ids` end every request; requests without a seed draw from the core's own generator, which `seed` starts;
        `decode` finds stop strings, which are refused without it. Raises StartupError when the model cannot be served or an
        engine argument is wrong.
        """
        problems = argument_problems(spec.vllm)
        if problems:
            raise StartupError("bad_spec", "; ".join(map(str, problems)))
        await anyio.to_thread.run_sync(preload, model_path, spec.device, abandon_on_cancel=True)
        arguments = engine_arguments(
            spec.vllm,
            model_path=model_path,
            dtype=spec.dtype,
            max_batch=spec.max_batch,
            max_model_len=spec.max_model_len,
            on_cpu=spec.device == "cpu",
            weight_transfer=spec.weight_transfer,
        )
        expected = await anyio.to_thread.run_sync(wanted_tensors, model_path, abandon_on_cancel=True)
        engine = cls(arguments, spec.threads, expected, stop_token_ids, seed, decode)
        await engine._start_core()
        try:
            await engine._try_out()
        except BaseException:
            await engine.aclose()
            raise
        return engine

    def __init__(
        self,
        arguments: dict[str, Any],
        threads: int,
        expected: dict[str, torch.Tensor],
        stop_token_ids: Collection[int],
        seed: int,
        decode: Decode | None,
    ) -> None:
        self._arguments = arguments
        self._threads = threads
        self._expected = expected
        self._stop = frozenset(stop_token_ids)
        self._seed = seed
        self._decode = decode

        self._state = _State.RESTARTING
        self._changed = anyio.Event()
        self._core: Core
        self._stats = CoreStats()
        self._requests: dict[str, Request] = {}
        self._weights: WeightsFile | None = None
        self._version = 0
        self._paused = False
        self._updating = anyio.Lock()
        self._starts = self._deaths_in_a_row = 0
        self._start_s = 0.0

    @property
    def vocab_size(self) -> int:
        return self._core.llm.model_config.get_vocab_size()

    @property
    def max_model_len(self) -> int:
        return self._core.llm.model_config.max_model_len

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def wanted(self) -> dict[str, torch.Tensor]:
        """The tensors that its weights are made of, by name, without data."""
        return self._expected

    @property
    def gpus(self) -> int:
        """How many worker processes of it hold a part of the model."""
        parallel = self._core.llm.vllm_config.parallel_config
        return int(parallel.world_size * parallel.data_parallel_size)

    @property
    def core_pids(self) -> list[int]:
        """The processes of the core that runs now, or did last."""
        return self._core.pids

    async def generate(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, *, begun: Sequence[int] = ()
    ) -> Generation:
        """See `Engine.generate`. Raises EngineRestarting when the core dies with the call in it, or has lost its weights."""
        self._check([*prompt, *begun], sampling)
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is running already")
        request = self._requests[request_id] = Request(request_id)
        params = sampling_params(sampling, stop_token_ids=self._stop, vocab_size=self.vocab_size)
        stop_text = StopText(self._decode, sampling.stop) if self._decode and sampling.stop else None
        try:
            core = await self._serving()
            with self._loss_of("the call"):
                generation = await complete(core, request, prompt, params, stop_text, begun=begun)
        except vllm("exceptions:VLLMClientError") as error:
            raise ValueError(str(error)) from error
        finally:
            del self._requests[request_id]
        self._deaths_in_a_row = 0
        return generation

    async def abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            with contextlib.suppress(CoreDied):  # then its call has failed
                await request.abort()

    async def pause(self) -> None:
        """See `Engine.pause`. A pause that is cancelled is taken back."""
        try:
            async with self._updating:
                core = await self._serving(with_weights=False)
                self._paused = True
                with self._loss_of("the pause"):
                    await core.pause(clear_cache=False)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await self.resume()
            raise

    async def resume(self) -> None:
        async with self._updating:
            core = await self._serving(with_weights=False)
            self._paused = False
            with self._loss_of("the resumption"):
                await core.resume()

    async def load_weights(self, path: Path, version: int) -> None:
        """See `Engine.load_weights`. Once begun it is not cancelled: it ends, within a bound, with the new version or with
        EngineRestarting, upon which the old one is restored."""
        file = await open_checked(self._expected, path, version)
        try:
            async with self._updating:
                core = await self._serving(with_weights=False)
                with anyio.CancelScope(shield=True), self._loss_of("the load"):
                    await self._load(core, file)
        finally:
            if file is not self._weights:
                file.close()

    async def receive_weights(self, receive: Callable[[Core], Awaitable[None]], version: int) -> None:
        """Replace the weights by those that `receive` gives the paused core, within a deadline of its own.

        Otherwise like `load_weights`; but a core that is restarted later does not have them, and does not serve before it
        is given some. Needs `EngineSpec.weight_transfer`.
        """
        async with self._updating:
            core = await self._serving(with_weights=False)
            with anyio.CancelScope(shield=True), self._loss_of("the load"):
                await change_weights(core, receive, version, resume=not self._paused)
                self._serve_version(version, None)

    def stats(self) -> EngineStats:
        running = min(self._stats.running, len(self._requests))
        return EngineStats(
            running=running,
            waiting=len(self._requests) - running,
            kv_usage=self._stats.kv_usage if self._requests else 0.0,
            generated_tokens=self._stats.generated,
            weight_version=self._version,
            preemptions=self._stats.preempted,
            restarts=self._starts - 1,
            serving=self._state is _State.SERVING,
        )

    async def watch(self) -> NoReturn:
        """See `Engine.watch`; restarts the core whenever it dies. When cancelled, a core that is being started ends by
        itself."""
        try:
            while not self._closed:
                await self._replace(await self._core.died())
        except EngineDead:
            self._move(_State.CLOSED)
            raise
        raise EngineDead("the engine was closed")

    async def aclose(self) -> None:
        """See `Engine.aclose`; after some 10 s the core is killed."""
        if not self._closed:
            self._move(_State.CLOSED)
            with anyio.CancelScope(shield=True), contextlib.suppress(CoreDied):
                await self._core.ask(self._core.llm.abort(list(self._requests)), within_s=_ABORT_S)
        await self._core.stop()
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    # The core's life.

    @property
    def _closed(self) -> bool:
        return self._state is _State.CLOSED

    def _move(self, to: _State) -> None:
        if to not in _MOVES[self._state]:
            raise RuntimeError(f"the engine is {self._state.name} and cannot become {to.name}")
        self._state = to
        self._changed.set()
        self._changed = anyio.Event()

    async def _serving(self, *, with_weights: bool = True) -> Core:
        """The core, when there is one that works."""
        while not self._closed and (self._state is _State.RESTARTING or self._core.over):
            await self._changed.wait()
        if self._closed:
            raise EngineDead("the engine was closed")
        if self._state is _State.WITHOUT_WEIGHTS and with_weights:
            raise EngineRestarting("the engine was restarted and has not been given its weights again")
        return self._core

    async def _start_core(self) -> None:
        started = time.monotonic()
        # Another seed each time: a core that is restarted would else draw the same numbers again.
        arguments = self._arguments | {"seed": (self._seed + 7919 * self._starts) % (1 << 31)}
        self._core = await Core.start(arguments, threads=self._threads, stats=self._stats)
        self._starts += 1
        self._start_s = max(self._start_s, time.monotonic() - started)

    async def _try_out(self) -> None:
        """One token, so that a model that vLLM takes and then cannot compute is found out before the first call."""
        params = sampling_params(Sampling(max_tokens=1), stop_token_ids=(), vocab_size=self.vocab_size)
        try:
            await complete(self._core, Request("try-out"), [0], params)
        except CoreDied as error:
            raise StartupError(
                "unsupported_model", f"vLLM cannot compute this model: {error}", "its traceback is above"
            ) from error
        self._move(_State.SERVING)

    async def _replace(self, why: str) -> None:
        """After the core's death: start one that serves what it did. One that dies on the way is replaced like any other."""
        if self._closed:
            return
        if self._state is not _State.RESTARTING:
            self._move(_State.RESTARTING)
        logger.error("%s; starting another", why)
        await self._core.stop()
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > _DEATHS_IN_A_ROW:
            raise EngineDead(f"{self._deaths_in_a_row} engine cores died one after another, the last one: {why}")
        patience = 30 + 3 * self._start_s
        try:
            with anyio.fail_after(patience):
                await self._start_core()
        except TimeoutError as error:
            raise EngineDead(f"another engine core was not up after {patience:.0f} s") from error
        except StartupError as error:
            raise EngineDead(f"no other engine core could be started: {error.message}") from error
        with contextlib.suppress(CoreDied):
            await self._restore()
        if self._closed:
            await self._core.stop()

    async def _restore(self) -> None:
        core = self._core
        if self._weights is not None:
            await load_file(core, self._weights, resume=not self._paused)
        elif self._paused:
            await core.pause(clear_cache=False)
        has_weights = self._weights is not None or self._version == 0
        if not has_weights:
            self._version = 0
        if not self._closed:
            self._move(_State.SERVING if has_weights else _State.WITHOUT_WEIGHTS)

    async def _load(self, core: Core, file: WeightsFile) -> None:
        await load_file(core, file, resume=not self._paused)
        self._serve_version(file.version, file)

    def _serve_version(self, version: int, file: WeightsFile | None) -> None:
        old, self._weights = self._weights, file
        self._version = version
        if self._state is _State.WITHOUT_WEIGHTS:
            self._move(_State.SERVING)
        if old is not None:
            old.close()

    @contextmanager
    def _loss_of(self, what: str) -> Generator[None]:
        """Inside, the core's death is told as the protocol has it."""
        try:
            yield
        except CoreDied as error:
            kind = EngineDead if self._closed else EngineRestarting
            raise kind(f"{what} was lost: {error}") from error

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        draw.check(sampling, self.vocab_size)
        if not 1 <= len(prompt) < self.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; allowed are 1 to {self.max_model_len - 1} (max_model_len - 1)"
            )
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"token {bad} is not in the vocabulary (0 to {self.vocab_size - 1})")
        if 0 < sampling.temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature is {sampling.temperature}; allowed: 0 (greedy), or {LOWEST_TEMPERATURE} or more"
            )
        if sampling.stop and self._decode is None:
            raise ValueError("this engine was started without a decoder, which stop strings need")
