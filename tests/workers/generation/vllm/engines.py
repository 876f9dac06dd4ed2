"""Starts vLLM engines for tests, and waits for what happens in them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from ledger.records import Sampling
from workers.generation.api import EngineSpec
from workers.generation.engine import Generation
from workers.generation.stop_text import Decode
from workers.generation.vllm_engine import VLLMEngine
from workers.generation.vllm_process import prepare_process

HEAD = {"head_dim": 32}
"""vLLM's attention on CPUs takes no smaller heads."""
TOLERANCE = 5e-5


@asynccontextmanager
async def running_vllm(
    path: Path, *, stop: Collection[int] = (), seed: int = 0, decode: Decode | None = None, **spec: Any
) -> AsyncIterator[VLLMEngine]:
    prepare_process(on_cpu=True, gpus=())
    engine = await VLLMEngine.start(
        path, EngineSpec(kind="vllm", **spec), stop_token_ids=stop, seed=seed, decode=decode
    )
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.watch)
            yield engine
            tasks.cancel_scope.cancel()
    finally:
        await engine.aclose()


async def generate_all(
    engine: VLLMEngine, requests: list[tuple[list[int], Sampling]], *, name: str = "r"
) -> list[Generation]:
    results: dict[int, Generation] = {}

    async def one(i: int, prompt: list[int], sampling: Sampling) -> None:
        results[i] = await engine.generate(f"{name}{i}", prompt, sampling)

    async with anyio.create_task_group() as group:
        for i, (prompt, sampling) in enumerate(requests):
            group.start_soon(one, i, prompt, sampling)
    return [results[i] for i in range(len(requests))]


async def tokens_generated(engine: VLLMEngine, more: int) -> None:
    """Wait until the engine has generated so many more tokens."""
    target = engine.stats().generated_tokens + more
    while engine.stats().generated_tokens < target:
        await anyio.sleep(0.002)
