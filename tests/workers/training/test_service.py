"""The RPC methods in one process: failures as data, and compute that neither blocks the loop nor is half done."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import torch

from dataplane.memory import MemoryPlane
from dataplane.plane import Column
from dataplane.schema import TRAIN
from dataplane.spec import PlaneSpec, ServerAddress
from tests.workers.training.make import Rows, begin, make_trainer, random_rows, same, train_rows, train_step, weights
from workers.host import StartupError
from workers.rpc.client import RpcClient
from workers.rpc.errors import RemoteError
from workers.rpc.method import Empty
from workers.rpc.server import RpcServer
from workers.training import api, service
from workers.training.compute import ComputeThread
from workers.training.service import TrainingService, build_trainer
from workers.training.trainer import Trainer
from workers.weight_sync.file import FileTransport
from workers.weight_sync.spec import WeightSyncSpec

pytestmark = pytest.mark.anyio

NO_PLANE = PlaneSpec(
    controller=ServerAddress(role="controller", id="c", ip="127.0.0.1", ports={}),
    storage=(ServerAddress(role="storage", id="s", ip="127.0.0.1", ports={}),),
)


def spec_of(model: Path, folder: Path, **changes: Any) -> api.TrainingSpec:
    spec = api.TrainingSpec(
        name="trainer",
        model_path=str(model),
        plane=NO_PLANE,
        optimizer=api.OptimizerSpec(lr=1e-3),
        loss=api.LossSpec(),
        temperature=1.0,
        max_completion_tokens=20,
        weight_sync=WeightSyncSpec(folder=str(folder / "weights")),
    )
    return msgspec.structs.replace(spec, **changes)


class RecordingPlane(MemoryPlane):
    """Says when it has been read a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.second_read = anyio.Event()
        self._reads = 0

    async def get(self, *args: Any, **kwargs: Any) -> list[dict[str, Column]]:
        rows = await super().get(*args, **kwargs)
        self._reads += 1
        if self._reads == 2:
            self.second_read.set()
        return rows


class Worker:
    """A served trainer, its client, and its plane."""

    def __init__(self, trainer: Trainer, plane: RecordingPlane, client: RpcClient) -> None:
        self.trainer, self.plane, self.client = trainer, plane, client

    async def microbatch(self, step: int, index: int, rows: Sequence[api.TrainRow]) -> api.MicrobatchDone:
        request = api.Microbatch(step=step, index=index, partition=TRAIN, rows=tuple(rows))
        return await self.client.call(api.TRAIN_MICROBATCH, request)


@asynccontextmanager
async def served(model: Path, folder: Path, rows: Rows, **changes: Any) -> AsyncGenerator[Worker]:
    spec, plane = spec_of(model, folder, **changes), RecordingPlane()
    trainer = build_trainer(spec)
    await plane.put(TRAIN, rows)
    server = RpcServer("trainer")
    compute = ComputeThread(spec.threads)
    TrainingService(trainer, compute, plane, FileTransport(spec.weight_sync), spec).register(server)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            address = await tasks.start(server.serve, f"unix:{folder}/rpc", "secret")
            async with RpcClient(address, "secret", name="trainer") as client:
                yield Worker(trainer, plane, client)
            tasks.cancel_scope.cancel()
    compute.close()


@contextmanager
def slow_compute(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> Generator[tuple[threading.Event, Callable[[], None]]]:
    """Microbatches wait on the compute thread, before they compute, until released; the event says one has come there."""
    entered, release = threading.Event(), threading.Event()
    train = trainer.train_microbatch

    def gated(*args: Any) -> api.MicrobatchDone:
        entered.set()
        assert release.wait(60)
        return train(*args)

    monkeypatch.setattr(trainer, "train_microbatch", gated)
    try:
        yield entered, release.set
    finally:
        release.set()


async def until(event: threading.Event) -> None:
    assert await anyio.to_thread.run_sync(event.wait, 60)


def direct(model: Path, rows: Rows, announced: Sequence[Sequence[api.TrainRow]]) -> Trainer:
    """A trainer that took the same step without any RPC."""
    trainer = make_trainer(model, dtype=torch.float32)
    train_step(trainer, 0, rows, announced)
    return trainer


async def test_a_step_over_rpc_is_the_step_of_the_trainer(model: Path, tmp_path: Path):
    rows = random_rows(6)
    announced = train_rows(rows)
    async with served(model, tmp_path, rows) as worker:
        info = await worker.client.call(api.INFO, Empty())
        assert (info.step, info.parameters) == (0, worker.trainer.info().parameters)
        await worker.client.call(api.BEGIN_STEP, begin(0, rows))
        done = [await worker.microbatch(0, i, part) for i, part in enumerate((announced[:4], announced[4:]))]
        metrics = await worker.client.call(api.FINISH_STEP, api.FinishStep(step=0))
        assert metrics.loss == pytest.approx(sum(part.loss for part in done))
        assert metrics.tokens == sum(part.tokens for part in done)
        assert same(weights(worker.trainer), weights(direct(model, rows, [announced[:4], announced[4:]])))
        published = await worker.client.call(api.PUBLISH_WEIGHTS, api.Publish(version=1))
        assert published.address == str(tmp_path / "weights" / "v1.safetensors")
        assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v1.safetensors"]


async def test_logprobs_of_many_rows_are_computed_in_bounded_passes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(service, "FORWARD_TOKENS", 40)
    rows = random_rows(12)
    async with served(model, tmp_path, rows, loss=api.LossSpec(old_logprobs="policy", kl_coef=0.1)) as worker:
        for kept in ("policy", "reference"):
            request = api.RowKeys(step=0, partition=TRAIN, keys=tuple(rows), model=kept)
            await worker.client.call(api.LOGPROBS, request)
        kept = worker.trainer._kept
        assert kept.keys() == {(m, key) for m in ("policy", "reference") for key in rows}
        assert all(kept["policy", key].shape[0] == row["loss_mask"].sum() for key, row in rows.items())


async def test_a_microbatch_whose_caller_left_is_in_the_step_exactly_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = random_rows(6)
    announced = train_rows(rows)
    async with served(model, tmp_path, rows) as worker:
        await worker.client.call(api.BEGIN_STEP, begin(0, rows))
        with slow_compute(worker.trainer, monkeypatch) as (entered, release):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(worker.microbatch, 0, 0, announced[:3])
                await until(entered)
                tasks.cancel_scope.cancel()
            release()
            with pytest.raises(RemoteError, match="microbatch 0 of step 0 is trained already") as refused:
                await worker.microbatch(0, 0, announced[:3])
        assert refused.value.failure.kind == "out_of_order"
        await worker.microbatch(0, 1, announced[3:])
        await worker.client.call(api.FINISH_STEP, api.FinishStep(step=0))
        assert same(weights(worker.trainer), weights(direct(model, rows, [announced[:3], announced[3:]])))


async def test_a_call_cancelled_while_it_waits_for_the_thread_never_computes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = random_rows(6)
    announced = train_rows(rows)
    async with served(model, tmp_path, rows) as worker:
        await worker.client.call(api.BEGIN_STEP, begin(0, rows))
        with slow_compute(worker.trainer, monkeypatch) as (entered, release):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(worker.microbatch, 0, 0, announced[:3])
                await until(entered)
                async with anyio.create_task_group() as impatient:
                    impatient.start_soon(worker.microbatch, 0, 1, announced[3:])
                    await worker.plane.second_read.wait()
                    impatient.cancel_scope.cancel()
                while (await worker.client.health()).in_flight > 1:
                    pass
                release()
        await worker.microbatch(0, 1, announced[3:])
        await worker.client.call(api.FINISH_STEP, api.FinishStep(step=0))
        assert same(weights(worker.trainer), weights(direct(model, rows, [announced[:3], announced[3:]])))


async def test_a_step_cut_off_between_microbatches_can_be_saved_and_begun_anew(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What the controller does on an interrupt: its train pump is cancelled in mid-microbatch, then it checkpoints."""
    rows = random_rows(6)
    announced = train_rows(rows)
    async with served(model, tmp_path, rows) as worker:
        before = weights(worker.trainer)
        await worker.client.call(api.BEGIN_STEP, begin(0, rows))
        with slow_compute(worker.trainer, monkeypatch) as (entered, release):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(worker.microbatch, 0, 0, announced[:3])
                await until(entered)
                tasks.cancel_scope.cancel()
            release()
        path = str(tmp_path / "checkpoint")
        await worker.client.call(api.SAVE, api.StatePath(path=path))
        info = await worker.client.call(api.LOAD, api.StatePath(path=path))
        assert info.step == 0
        assert same(weights(worker.trainer), before)
        await worker.client.call(api.BEGIN_STEP, begin(0, rows))
        await worker.microbatch(0, 0, announced)
        await worker.client.call(api.FINISH_STEP, api.FinishStep(step=0))
        assert same(weights(worker.trainer), weights(direct(model, rows, [announced])))


async def test_the_loop_reads_rows_and_answers_health_while_a_microbatch_computes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = random_rows(6)
    announced = train_rows(rows)
    async with served(model, tmp_path, rows) as worker:
        await worker.client.call(api.BEGIN_STEP, begin(0, rows))
        with slow_compute(worker.trainer, monkeypatch) as (entered, release):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(worker.microbatch, 0, 0, announced[:3])
                await until(entered)
                tasks.start_soon(worker.microbatch, 0, 1, announced[3:])
                await worker.plane.second_read.wait()
                assert (await worker.client.health()).in_flight == 2
                release()
        await worker.client.call(api.FINISH_STEP, api.FinishStep(step=0))


async def test_failures_cross_as_data(model: Path, tmp_path: Path):
    rows = random_rows(4)
    announced = train_rows(rows)

    async def failure(call: Any) -> tuple[str, str, bool]:
        with pytest.raises(RemoteError) as error:
            await call
        found = error.value.failure
        return found.kind, found.failure_class, found.retryable

    async with served(model, tmp_path, rows) as worker:
        call = worker.client.call
        assert await failure(worker.microbatch(0, 0, announced)) == ("out_of_order", "infra", False)
        await call(api.BEGIN_STEP, begin(0, rows))
        gone = msgspec.structs.replace(announced[0], key="nobody")
        assert await failure(worker.microbatch(0, 0, [gone])) == ("row_gone", "data", False)
        longer = msgspec.structs.replace(announced[0], length=99)
        assert await failure(worker.microbatch(0, 0, [longer])) == ("bad_row", "data", False)
        endless = msgspec.structs.replace(announced[0], advantage=float("inf"))
        assert await failure(worker.microbatch(0, 0, [endless])) == ("non_finite", "data", False)
        nowhere = api.StatePath(path=str(tmp_path / "nothing"))
        assert await failure(call(api.LOAD, nowhere)) == ("bad_checkpoint", "infra", False)
        reference = api.RowKeys(step=0, partition=TRAIN, keys=tuple(rows), model="reference")
        assert await failure(call(api.LOGPROBS, reference)) == ("out_of_order", "infra", False)


async def test_all_compute_runs_on_one_thread_with_its_own_thread_count():
    compute = ComputeThread(3)
    try:
        seen = {await compute.run(threading.get_ident) for _ in range(3)}
        assert len(seen) == 1
        assert threading.get_ident() not in seen
        assert await compute.run(torch.get_num_threads) == 3
        with pytest.raises(ZeroDivisionError):
            await compute.run(lambda: 1 // 0)
    finally:
        compute.close()


def test_a_missing_model_is_a_clear_start_up_error(tmp_path: Path):
    with pytest.raises(StartupError, match=r"there is no Hugging Face model in '.*nowhere'") as error:
        build_trainer(spec_of(tmp_path / "nowhere", tmp_path))
    assert (error.value.kind, error.value.remedy) == ("model_missing", "set model.path to a model directory")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"device": "abacus"}, "training.device is 'abacus', which torch does not know"),
        ({"temperature": 0.0}, "temperature is 0"),
    ],
)
def test_a_bad_spec_is_a_clear_start_up_error(model: Path, tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(StartupError, match=message):
        build_trainer(spec_of(model, tmp_path, **changes))
