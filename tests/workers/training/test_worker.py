"""The worker as the controller meets it: a process of its own, reading rows from TransferQueue's real servers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest
import torch

from dataplane.schema import TRAIN
from dataplane.servers import start_servers
from dataplane.spec import PlaneSpec, connect
from tests.workers.training.make import CPU, VOCAB, Rows, begin, make_trainer, random_rows, same, train_rows, train_step
from tests.workers.training.make import weights as weights_of
from tests.workers.training.test_service import spec_of
from workers.launch import LaunchError, launch
from workers.rpc.method import Empty
from workers.training import api
from workers.training.model import load_model
from workers.weights import load_into

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def servers() -> AsyncGenerator[PlaneSpec]:
    with anyio.fail_after(240):
        async with start_servers(timeout_s=120) as running:
            yield running.spec


def long_rows(count: int, length: int) -> Rows:
    rng = np.random.default_rng(0)
    mask = np.ones(length, np.uint8)
    mask[0] = 0
    return {
        f"long-{i}": {
            "input_ids": rng.integers(0, VOCAB, length),
            "loss_mask": mask,
            "rollout_logprobs": np.full(length, -4.6, np.float32),
            "weight_versions": np.zeros(length, np.int64),
        }
        for i in range(count)
    }


@pytest.mark.slow
async def test_steps_end_to_end(model: Path, tmp_path: Path):
    rows, long = random_rows(6), long_rows(32, 400)
    announced = train_rows(rows)
    async with servers() as plane_spec:
        spec = msgspec.structs.replace(spec_of(model, tmp_path), plane=plane_spec)
        plane = await connect(plane_spec)
        await plane.put(TRAIN, rows)
        await plane.put(TRAIN, long)
        async with launch("workers.training", name="trainer", spec=spec, env={"OMP_NUM_THREADS": "1"}) as worker:
            call = worker.client.call
            assert (await call(api.INFO, Empty())).step == 0
            await call(api.BEGIN_STEP, begin(0, rows))
            for index, part in enumerate((announced[:4], announced[4:])):
                await call(api.TRAIN_MICROBATCH, api.Microbatch(step=0, index=index, partition=TRAIN, rows=tuple(part)))
            metrics = await call(api.FINISH_STEP, api.FinishStep(step=0))
            mine = make_trainer(model, dtype=torch.float32)
            expected = train_step(mine, 0, rows, [announced[:4], announced[4:]])
            assert msgspec.structs.replace(metrics, seconds=0.0) == msgspec.structs.replace(expected, seconds=0.0)

            published = await call(api.PUBLISH_WEIGHTS, api.Publish(version=1))
            served = load_model(str(model), torch.float32, CPU)
            load_into(served, Path(published.address))
            assert same(dict(served.named_parameters()), weights_of(mine))

            await call(api.SAVE, api.StatePath(path=str(tmp_path / "checkpoint")))
            await call(api.BEGIN_STEP, begin(1, long))
            answers = 0
            async with anyio.create_task_group() as tasks:

                async def train_long() -> None:
                    request = api.Microbatch(step=1, index=0, partition=TRAIN, rows=tuple(train_rows(long)))
                    await call(api.TRAIN_MICROBATCH, request)
                    tasks.cancel_scope.cancel()

                tasks.start_soon(train_long)
                while True:
                    health = await worker.client.health(timeout=5.0)
                    answers += health.in_flight
            assert answers > 3, "health answers while a microbatch computes"
            await call(api.FINISH_STEP, api.FinishStep(step=1))
            assert (await call(api.LOAD, api.StatePath(path=str(tmp_path / "checkpoint")))).step == 1
            again = await call(api.PUBLISH_WEIGHTS, api.Publish(version=2))
            assert await anyio.Path(again.address).read_bytes() == await anyio.Path(published.address).read_bytes()
        await plane.aclose()


async def test_a_missing_model_directory_is_told_at_launch(tmp_path: Path):
    spec = spec_of(tmp_path / "nowhere", tmp_path)
    with anyio.fail_after(120), pytest.raises(LaunchError, match="there is no Hugging Face model in") as error:
        async with launch("workers.training", name="trainer", spec=spec):
            pass
    assert error.value.kind == "model_missing"
