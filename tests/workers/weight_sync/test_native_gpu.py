"""vLLM's own transfer on real GPUs: NCCL to other GPUs, IPC on the same one, bf16, tensor parallel, and a peer that dies.

A trainer in a process of its own publishes from cuda:0; engines take it in while requests run. CUDA is not used in this
process, from which the engine cores are forked.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from ledger.records import Sampling
from tests.models import tiny_lm, tiny_model
from workers.generation.api import EngineSpec
from workers.generation.engine import EngineRestarting, Generation
from workers.generation.updates import UpdatingEngine
from workers.generation.vllm_engine import VLLMEngine
from workers.generation.vllm_native import NativeIntake
from workers.generation.vllm_process import prepare_process
from workers.weight_sync.spec import WeightSyncSpec
from workers.weight_sync.transport import make_publisher
from workers.weights import named_tensors

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.device_count() or importlib.util.find_spec("vllm") is None, reason="needs a GPU and vLLM"
    ),
]

MODEL = {"head_dim": 64, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
GREEDY = Sampling(max_tokens=24, temperature=0)


def gpus(n: int) -> Any:
    return pytest.mark.skipif(torch.cuda.device_count() < n, reason=f"needs {n} GPUs")


def serve_as_trainer(pipe: Connection, transport: str, dtype: str, timeout_s: float) -> None:
    """Publishes the model of a seed when told to, without its first tensor if asked."""
    publisher = make_publisher(WeightSyncSpec(transport=transport, timeout_s=timeout_s))
    while True:
        seed, version, whole = pipe.recv()
        model = tiny_lm("llama", seed=seed, **MODEL).to("cuda:0", getattr(torch, dtype))
        weights = list(named_tensors(model).items())
        pipe.send(publisher.publish(dict(weights if whole else weights[1:]), version))


class Trainer:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def publish(self, *, seed: int, version: int, whole: bool = True) -> str:
        def ask() -> str:
            self._pipe.send((seed, version, whole))
            assert self._pipe.poll(60)
            return self._pipe.recv()

        return await anyio.to_thread.run_sync(ask)


@contextmanager
def training(transport: str, *, dtype: str = "float32", timeout_s: float = 60) -> Iterator[Trainer]:
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=serve_as_trainer, args=(its, transport, dtype, timeout_s), daemon=True)
    process.start()
    try:
        yield Trainer(mine)
    finally:
        process.kill()
        process.join(10)


@asynccontextmanager
async def engine_on(
    model: Path, gpu: tuple[int, ...], transport: str, *, dtype: str = "float32"
) -> AsyncIterator[VLLMEngine]:
    # Each engine's process sees its own GPUs only, as a generation worker does.
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        prepare_process(on_cpu=False, gpus=gpu)
        spec = EngineSpec(
            kind="vllm",
            device="cuda",
            dtype=dtype,
            max_model_len=512,
            weight_transfer=transport,  # type: ignore[arg-type]
            vllm={"tensor_parallel_size": len(gpu), "gpu_memory_utilization": 0.2, "enforce_eager": True},
        )
        engine = await VLLMEngine.start(model, spec)
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.watch)
            yield engine
            tasks.cancel_scope.cancel()
    finally:
        await engine.aclose()


def agreement(model: Any, prompt: list[int], got: Generation) -> float:
    """Mean difference of logprobs between the engine and the trainer's model, on a CPU."""
    ids = torch.tensor([[*prompt, *got.token_ids]])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0].float().log_softmax(-1)
    mine = [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(got.token_ids)]
    return sum(abs(a - b) for a, b in zip(mine, got.logprobs, strict=True)) / len(mine)


@pytest.mark.parametrize(
    ("transport", "gpu", "dtype"),
    [
        pytest.param("ipc", (0,), "float32", id="ipc"),
        pytest.param("ipc", (0,), "bfloat16", id="ipc-bf16"),
        pytest.param("nccl", (1,), "float32", id="nccl", marks=gpus(2)),
        pytest.param("nccl", (1,), "bfloat16", id="nccl-bf16", marks=gpus(2)),
        pytest.param("nccl", (1, 2), "bfloat16", id="nccl-tp2", marks=gpus(3)),
    ],
)
async def test_two_updates_under_running_requests(
    tmp_path: Path, transport: str, gpu: tuple[int, ...], dtype: str
) -> None:
    directory = tiny_model(tmp_path / "model", seed=1, **MODEL)
    allowed = 1e-3 if dtype == "float32" else 0.05
    with training(transport, dtype=dtype) as trainer:
        async with engine_on(directory, gpu, transport, dtype=dtype) as engine:
            intake = NativeIntake(engine, UpdatingEngine(engine, "keep", drain_timeout_s=1), timeout_s=60)
            for version in (1, 2):
                address = await trainer.publish(seed=version + 1, version=version)
                running: list[Generation] = []

                async def one(name: str, into: list[Generation] = running) -> None:
                    into.append(await engine.generate(name, [1, 2, 3], Sampling(max_tokens=400)))

                async with anyio.create_task_group() as group:
                    for i in range(8):
                        group.start_soon(one, f"v{version}-{i}")
                    await anyio.sleep(0.2)
                    await intake.load(address, version)
                assert all(got.weight_spans[-1].version in (version - 1, version) for got in running)
                got = await engine.generate("g", [4, 5], GREEDY)
                assert [span.version for span in got.weight_spans] == [version]
                assert agreement(tiny_lm("llama", seed=version + 1, **MODEL), [4, 5], got) < allowed
            address = await trainer.publish(seed=4, version=3, whole=False)
            with pytest.raises(ValueError, match="missing"):
                await intake.load(address, 3)
            assert engine.weight_version == 2


@gpus(2)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_engine_that_dies_or_freezes_does_not_keep_the_trainer(tmp_path: Path, how: signal.Signals) -> None:
    directory = tiny_model(tmp_path / "model", seed=1, **MODEL)
    with training("nccl", timeout_s=10) as trainer:
        async with engine_on(directory, (1,), "nccl") as engine:
            intake = NativeIntake(engine, UpdatingEngine(engine, "keep", drain_timeout_s=1), timeout_s=10)
            await intake.load(await trainer.publish(seed=2, version=1), 1)
            os.kill(engine.core_pids[0], how)
            with anyio.fail_after(240):  # a frozen core is given a minute for an answer
                address = await trainer.publish(seed=3, version=2)
                with pytest.raises(EngineRestarting):
                    await intake.load(address, 2)
                await intake.load(address, 2)  # into the core that was forked in its place
            assert engine.weight_version == 2
            got = await engine.generate("g", [4, 5], GREEDY)
            assert agreement(tiny_lm("llama", seed=3, **MODEL), [4, 5], got) < 1e-3
