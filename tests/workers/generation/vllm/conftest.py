"""Real vLLM engines, forked from the test process: a second or two each, once vLLM is imported."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.models import tiny_model, tiny_tokenizer
from tests.workers.generation.vllm.engines import HEAD, running_vllm
from workers.generation.vllm_engine import VLLMEngine


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "llama", seed=1, **HEAD)


@pytest.fixture(scope="module")
async def engine(model_dir: Path) -> AsyncIterator[VLLMEngine]:
    """One for all tests of a module; each leaves it idle, with whatever weights."""
    async with running_vllm(model_dir, decode=tiny_tokenizer().decode) as engine:
        yield engine
