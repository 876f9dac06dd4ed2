"""The generation worker: engine, renderer and data plane behind the RPC methods of `workers.generation.api`."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from dataplane.spec import connect
from ledger.records import Message
from workers.devices import require_device
from workers.generation import api
from workers.generation.capture import Capture
from workers.generation.engine import Engine, EngineDead, EngineStats
from workers.generation.intake import WeightIntake, WeightsUnavailable, make_intake
from workers.generation.rendering import BadMessages, ChatRenderer
from workers.generation.updates import UpdatingEngine
from workers.generation.vllm_process import prepare_process
from workers.host import StartupError, run_worker
from workers.rpc.errors import HandlerError
from workers.rpc.method import Empty
from workers.rpc.server import RpcServer

if TYPE_CHECKING:
    from workers.generation.torch_engine import TorchEngine
    from workers.generation.vllm_engine import VLLMEngine

_CLOSE_SECONDS = 5.0


class GenerationService:
    """The worker's handlers."""

    def __init__(self, engine: Engine, capture: Capture, intake: WeightIntake, engine_kind: str) -> None:
        self._engine = engine
        self._intake = intake
        self._capture = capture
        self._engine_kind = engine_kind

    def register(self, server: RpcServer) -> None:
        server.register(api.GENERATE, self._capture.answer)
        server.register(api.ABORT, self.abort)
        server.register(api.LOAD_WEIGHTS, self.load_weights)
        server.register(api.INFO, self.info)
        server.register(api.STATS, self.stats)

    async def abort(self, request: api.Abort) -> Empty:
        await self._engine.abort(request.call_id)
        return Empty()

    async def load_weights(self, request: api.LoadWeights) -> api.WeightsLoaded:
        started = time.monotonic()
        try:
            await self._intake.load(request.address, request.version)
        except ValueError as error:
            raise HandlerError("bad_weights", str(error)) from error
        except EngineDead as error:
            raise HandlerError(error.kind, str(error), retryable=True) from error
        except WeightsUnavailable as error:
            raise HandlerError("weights_unavailable", str(error), retryable=True) from error
        return api.WeightsLoaded(version=self._engine.weight_version, seconds=time.monotonic() - started)

    async def info(self, _: Empty) -> api.WorkerInfo:
        return api.WorkerInfo(
            max_model_len=self._engine.max_model_len,
            vocab_size=self._engine.vocab_size,
            weight_version=self._engine.weight_version,
            engine=self._engine_kind,
        )

    async def stats(self, _: Empty) -> EngineStats:
        return self._engine.stats()


@asynccontextmanager
async def serve(spec: api.GenerationSpec, server: RpcServer) -> AsyncGenerator[None]:
    """Load the model, join the data plane, register the handlers. Raises StartupError; ends when the engine dies."""
    logging.getLogger("renderers").setLevel(logging.WARNING)
    model_path = Path(spec.model_path)
    # A stop does not wait for imports and files: the process ends, and the thread with it.
    engine_type = await anyio.to_thread.run_sync(_engine_type, spec.engine, abandon_on_cancel=True)
    renderer = await anyio.to_thread.run_sync(ChatRenderer.load, model_path, abandon_on_cancel=True)
    sync = spec.weight_sync
    started = await engine_type.start(
        model_path,
        spec.engine,
        stop_token_ids=renderer.stop_token_ids,
        seed=spec.seed,
        decode=renderer.plain.decode,
    )
    renderer.bound.context = started.max_model_len
    engine = UpdatingEngine(started, sync.mode, drain_timeout_s=sync.drain_timeout_s)
    try:
        intake = await make_intake(started, engine, sync)
        await _check_template(model_path, renderer, engine)
        plane = await connect(spec.plane)
        try:
            service = GenerationService(engine, Capture(engine, renderer, plane), intake, spec.engine.kind)
            service.register(server)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.watch)
                yield
                tasks.cancel_scope.cancel()
        finally:
            with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
                await plane.aclose()
    finally:
        await engine.aclose()


def _engine_type(spec: api.EngineSpec) -> type[TorchEngine] | type[VLLMEngine]:
    """Imported when it is known which: torch takes a second, and it reads the environment that vLLM's engine sets."""
    if spec.kind == "vllm":
        prepare_process(on_cpu=spec.device == "cpu", gpus=spec.gpus)
        from workers.generation.vllm_engine import VLLMEngine

        return VLLMEngine
    require_device(spec.device, "generation.device")
    from workers.generation.torch_engine import TorchEngine

    return TorchEngine


async def _check_template(model_path: Path, renderer: ChatRenderer, engine: Engine) -> None:
    """A template or vocabulary that cannot serve any conversation is the model's fault, not the first environment's."""
    try:
        ids = await renderer.render_root([Message(role="user", content="Hello, World 0")])
    except BadMessages as error:
        raise StartupError(
            "bad_model",
            f"model.path: {model_path}: the chat template fails on a user message: {error}",
            "mend the template",
        ) from error
    if max(ids) >= engine.vocab_size:
        raise StartupError(
            "bad_model",
            f"model.path: {model_path}: the tokenizer gives token {max(ids)}, the model knows 0 to {engine.vocab_size - 1}",
            "model and tokenizer do not belong together",
        )


def main() -> None:
    run_worker(api.GenerationSpec, serve)
