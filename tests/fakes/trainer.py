"""A training worker without a model: it reads its rows, takes a token's time for each, and keeps what it was trained on.

The order of its calls is judged by the real trainer's state machine, and its failures are named as the real one names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio

from dataplane.errors import DataPlaneTimeout, RowGone
from dataplane.plane import Column, DataPlane
from dataplane.schema import TRAIN_COLUMNS
from tests.fakes.process import Handlers, Life
from workers.rpc.errors import HandlerError
from workers.rpc.method import Empty
from workers.training import api
from workers.training.errors import OutOfOrder
from workers.training.step import StepState


@dataclass
class Trained:
    """What went into finished optimizer steps."""

    steps: list[int] = field(default_factory=list[int])
    rows: dict[str, dict[str, Column]] = field(default_factory=dict[str, dict[str, Column]])
    twice: list[str] = field(default_factory=list[str])


class FakeTrainer:
    """`step_s(tokens)` is what a microbatch takes; what was trained is added to `trained` when its step is finished."""

    def __init__(
        self,
        life: Life,
        plane: DataPlane,
        *,
        trained: Trained,
        step_s: Callable[[int], float],
        finish_s: float = 0.2,
    ) -> None:
        self._process = life.process
        self._plane = plane
        self._trained = trained
        self._step_s = step_s
        self._finish_s = finish_s
        self._open: dict[str, dict[str, Column]] = {}
        self._order = StepState()
        self._compute = anyio.Lock()

    def handlers(self) -> Handlers:
        return {
            api.INFO.name: self.info,
            api.LOGPROBS.name: self.logprobs,
            api.BEGIN_STEP.name: self.begin_step,
            api.TRAIN_MICROBATCH.name: self.train_microbatch,
            api.FINISH_STEP.name: self.finish_step,
            api.PUBLISH_WEIGHTS.name: self.publish_weights,
            api.SAVE.name: self.save,
        }

    async def info(self, _: Empty) -> api.TrainerInfo:
        return api.TrainerInfo(parameters=1, step=self._order.step)

    async def logprobs(self, request: api.RowKeys) -> Empty:
        rows = await self._fetch(request.partition, request.keys)
        async with self._compute:
            await self._process.spend(self._step_s(sum(len(row["input_ids"]) for row in rows)) / 3)
        return Empty()

    async def begin_step(self, request: api.BeginStep) -> Empty:
        with _ordered():
            self._order.begin(request)
        self._open = {}
        return Empty()

    async def train_microbatch(self, request: api.Microbatch) -> api.MicrobatchDone:
        keys = [row.key for row in request.rows]
        rows = await self._fetch(request.partition, keys)
        for wanted, row in zip(request.rows, rows, strict=True):
            if len(row["input_ids"]) != wanted.length:
                raise HandlerError("bad_row", f"row {wanted.key!r} has another length", failure_class="data")
        tokens = sum(int(row["loss_mask"].sum()) for row in rows)
        async with self._compute:
            with _ordered():
                self._order.admit(request)
            with anyio.CancelScope(shield=True):  # What computes is not interrupted.
                await self._process.spend(self._step_s(sum(row.length for row in request.rows)))
            self._order.trained(request, tokens)
            self._open.update(zip(keys, rows, strict=True))
        return api.MicrobatchDone(loss=0.0, tokens=tokens)

    async def finish_step(self, request: api.FinishStep) -> api.StepMetrics:
        async with self._compute:
            with _ordered():
                self._order.require_complete(request.step)
            with anyio.CancelScope(shield=True):
                await self._process.spend(self._finish_s)
            self._order.finished()
            self._trained.steps.append(request.step)
            self._trained.twice += [key for key in self._open if key in self._trained.rows]
            self._trained.rows |= self._open
            return _metrics(self._order.begun.loss_tokens)

    async def publish_weights(self, request: api.Publish) -> api.Published:
        async with self._compute:
            await self._process.spend(0.05)
        return api.Published(address=f"weights.{request.version}", version=request.version, bytes=1, seconds=0.05)

    async def save(self, request: api.StatePath) -> Empty:
        async with self._compute:
            await self._process.spend(0.05)
        return Empty()

    async def _fetch(self, partition: str, keys: Sequence[str]) -> list[dict[str, Column]]:
        try:
            return await self._plane.get(partition, keys, TRAIN_COLUMNS)
        except RowGone as error:
            raise HandlerError("row_gone", str(error), failure_class="data") from error
        except DataPlaneTimeout as error:
            raise HandlerError("data_plane_timeout", str(error), retryable=True) from error


class _ordered:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OutOfOrder):
            raise HandlerError("out_of_order", str(error)) from error


def _metrics(tokens: int) -> api.StepMetrics:
    nothing = api.Agreement(tokens=0, difference_mean=0.0, difference_max=0.0, kl=0.0, ratio_quantiles=(1.0,) * 5)
    return api.StepMetrics(
        loss=0.0,
        grad_norm=0.0,
        lr=0.0,
        entropy=0.0,
        clip_fraction=0.0,
        ratio_mean=1.0,
        agreement=nothing,
        agreement_by_age={},
        kl_reference=None,
        tokens=tokens,
        seconds=0.0,
    )
