"""`python -m benchmarks.bare_vllm`: a process that holds AsyncLLM and nothing else, for `benchmarks.end_to_end`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
from msgspec import Struct

from ledger.records import Sampling
from workers.generation.api import GenerationSpec
from workers.generation.vllm_args import engine_arguments
from workers.generation.vllm_core import Core, CoreStats
from workers.generation.vllm_names import vllm
from workers.generation.vllm_process import preload, prepare_process
from workers.generation.vllm_request import sampling_params
from workers.host import run_worker
from workers.rpc.method import Method
from workers.rpc.server import RpcServer


class Load(Struct, frozen=True, kw_only=True):
    prompts: list[list[int]]
    lengths: list[int]
    """Tokens to generate for each."""
    concurrency: int


class Done(Struct, frozen=True, kw_only=True):
    seconds: float
    cpu_s: float
    """Of this process: AsyncLLM's own work, beside its core's."""


RUN = Method("run", Load, Done, timeout_s=600.0)


@asynccontextmanager
async def serve(spec: GenerationSpec, server: RpcServer) -> AsyncGenerator[None]:
    prepare_process(on_cpu=True, gpus=())
    path = Path(spec.model_path)
    await anyio.to_thread.run_sync(preload, path, "cpu")
    engine = spec.engine
    arguments = engine_arguments(
        engine.vllm,
        model_path=path,
        dtype=engine.dtype,
        max_batch=engine.max_batch,
        max_model_len=engine.max_model_len,
        on_cpu=True,
    )
    core = await Core.start(arguments, threads=engine.threads, stats=CoreStats())

    async def run(load: Load) -> Done:
        places = anyio.Semaphore(load.concurrency)

        async def one(n: int, prompt: list[int], length: int) -> None:
            params = sampling_params(Sampling(max_tokens=length), stop_token_ids=(), vocab_size=1)
            async with places:
                async for _ in core.llm.generate(vllm("inputs:tokens_input")(prompt), params, str(n)):
                    pass

        start, cpu = time.perf_counter(), time.process_time()
        async with anyio.create_task_group() as tasks:
            for n, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True)):
                tasks.start_soon(one, n, prompt, length)
        return Done(seconds=time.perf_counter() - start, cpu_s=time.process_time() - cpu)

    server.register(RUN, run)
    try:
        yield
    finally:
        await core.stop()


if __name__ == "__main__":
    run_worker(GenerationSpec, serve)
