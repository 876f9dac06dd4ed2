"""The training worker's RPC methods: data-plane reads on the loop, everything else on one compute thread, call by call.

A cancelled call whose compute has begun is not interrupted: the compute runs to its end, counts, and its reply is lost. So
the trainer is always between two calls, and a microbatch that was trained unheard is refused when it is sent again, as
"trained already". While one microbatch computes, the next one's rows may be read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import torch

from dataplane.errors import DataPlaneTimeout, RowGone
from dataplane.plane import DataPlane
from dataplane.spec import connect
from workers.devices import require_device
from workers.host import StartupError
from workers.rpc.errors import FailureClass, HandlerError
from workers.rpc.method import Empty
from workers.rpc.server import RpcServer
from workers.training import api
from workers.training.compute import ComputeThread
from workers.training.errors import BadCheckpoint, BadTrainRow, BadWeights, NonFinite, NoSpace, OutOfOrder
from workers.training.model import DTYPES, Policy, load_model
from workers.training.publish import publish
from workers.training.rows import collate, fetch_rows, split
from workers.training.state import load, save
from workers.training.trainer import Trainer
from workers.weight_sync.transport import WeightPublisher, make_publisher
from workers.weights import expected_tensors

Result = TypeVar("Result")

FORWARD_TOKENS = 16_384
"""Padded tokens of one forward pass without gradient."""
CLOSE_TIMEOUT_S = 5.0

FAILURES: dict[type[Exception], tuple[str, FailureClass, bool]] = {
    OutOfOrder: ("out_of_order", "infra", False),
    BadTrainRow: ("bad_row", "data", False),
    NonFinite: ("non_finite", "data", False),
    BadWeights: ("bad_weights", "infra", False),
    BadCheckpoint: ("bad_checkpoint", "infra", False),
    NoSpace: ("no_space", "infra", True),
    RowGone: ("row_gone", "data", False),
    DataPlaneTimeout: ("data_plane_timeout", "infra", True),
}
"""Failure kind, class and whether a retry can help."""


class TrainingService:
    """Answers the methods of `workers.training.api` with one trainer."""

    def __init__(
        self,
        trainer: Trainer,
        compute: ComputeThread,
        plane: DataPlane,
        publisher: WeightPublisher,
        spec: api.TrainingSpec,
    ) -> None:
        self._trainer = trainer
        self._thread = compute
        self._plane = plane
        self._model_path = Path(spec.model_path)
        self._publisher = publisher
        self._wanted: dict[str, torch.Tensor] | None = None
        self._vocab_size = trainer.policy.vocab_size
        self._device = trainer.policy.device

    def register(self, server: RpcServer) -> None:
        server.register(api.INFO, self.info)
        server.register(api.LOGPROBS, self.logprobs)
        server.register(api.BEGIN_STEP, self.begin_step)
        server.register(api.TRAIN_MICROBATCH, self.train_microbatch)
        server.register(api.FINISH_STEP, self.finish_step)
        server.register(api.PUBLISH_WEIGHTS, self.publish_weights)
        server.register(api.SAVE, self.save)
        server.register(api.LOAD, self.load)

    async def info(self, _: Empty) -> api.TrainerInfo:
        return await self._compute(self._trainer.info)

    async def logprobs(self, request: api.RowKeys) -> Empty:
        with _failures():
            rows = await fetch_rows(self._plane, request.partition, request.keys)

        def compute() -> None:
            for chunk in split(rows, FORWARD_TOKENS):
                keys, members = [request.keys[i] for i in chunk], [rows[i] for i in chunk]
                batch = collate(keys, members, vocab_size=self._vocab_size, device=self._device)
                self._trainer.logprobs(request.step, request.model, batch)

        await self._compute(compute)
        return Empty()

    async def begin_step(self, request: api.BeginStep) -> Empty:
        await self._compute(lambda: self._trainer.begin_step(request))
        return Empty()

    async def train_microbatch(self, request: api.Microbatch) -> api.MicrobatchDone:
        keys, lengths = [row.key for row in request.rows], [row.length for row in request.rows]
        with _failures():
            rows = await fetch_rows(self._plane, request.partition, keys)

        def compute() -> api.MicrobatchDone:
            batch = collate(
                keys,
                rows,
                vocab_size=self._vocab_size,
                device=self._device,
                lengths=lengths,
                version=request.step,
            )
            return self._trainer.train_microbatch(request, batch)

        return await self._compute(compute)

    async def finish_step(self, request: api.FinishStep) -> api.StepMetrics:
        return await self._compute(lambda: self._trainer.finish_step(request.step))

    async def publish_weights(self, request: api.Publish) -> api.Published:
        def compute() -> api.Published:
            if self._wanted is None:
                self._wanted = expected_tensors(self._model_path)
            return publish(self._trainer, self._publisher, request.version, self._wanted)

        return await self._compute(compute)

    async def save(self, request: api.StatePath) -> Empty:
        await self._compute(lambda: save(self._trainer, Path(request.path), model_path=self._model_path))
        return Empty()

    async def load(self, request: api.StatePath) -> api.TrainerInfo:
        def compute() -> api.TrainerInfo:
            load(self._trainer, Path(request.path))
            return self._trainer.info()

        return await self._compute(compute)

    async def _compute(self, function: Callable[[], Result]) -> Result:
        with _failures():
            return await self._thread.run(function)


@contextmanager
def _failures() -> Generator[None]:
    """Say a known error's failure kind and class."""
    try:
        yield
    except tuple(FAILURES) as error:
        kind, failure_class, retryable = FAILURES[type(error)]
        raise HandlerError(kind, str(error), failure_class=failure_class, retryable=retryable) from error


def build_trainer(spec: api.TrainingSpec) -> Trainer:
    """Load the model and make its trainer. Raises StartupError saying what is wrong with the spec."""
    torch.manual_seed(spec.seed)  # pyright: ignore[reportUnknownMemberType]
    if spec.dtype not in DTYPES:
        raise StartupError("bad_spec", f"dtype {spec.dtype!r} is unknown", f"use one of {', '.join(DTYPES)}")
    require_device(spec.device, "training.device")
    if not (Path(spec.model_path) / "config.json").is_file():
        raise StartupError(
            "model_missing",
            f"there is no Hugging Face model in {spec.model_path!r} (no config.json)",
            "set model.path to a model directory",
        )
    try:
        dtype, device = DTYPES[spec.dtype], torch.device(spec.device)
        return Trainer(
            Policy(load_model(spec.model_path, dtype, device)),
            optimizer=spec.optimizer,
            loss=spec.loss,
            temperature=spec.temperature,
            max_completion_tokens=spec.max_completion_tokens,
            reference=load_model(spec.model_path, dtype, device) if spec.loss.kl_coef else None,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise StartupError("bad_spec", f"the trainer cannot be made from {spec.model_path!r}: {error}") from error


@asynccontextmanager
async def serve(spec: api.TrainingSpec, server: RpcServer) -> AsyncGenerator[None]:
    """Load the model, connect to the data plane, register the methods; see `workers.host.run_worker`."""
    compute = ComputeThread(spec.threads)
    try:
        trainer = await compute.run(partial(build_trainer, spec))
        publisher = await compute.run(partial(make_publisher, spec.weight_sync))
        try:
            plane = await connect(spec.plane)
            try:
                TrainingService(trainer, compute, plane, publisher, spec).register(server)
                yield
            finally:
                with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                    await plane.aclose()
        finally:
            with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await anyio.to_thread.run_sync(publisher.close, abandon_on_cancel=True)
    finally:
        compute.close()
