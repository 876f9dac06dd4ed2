"""A tiny model on disk, and one torch thread: results of two runs are compared bit for bit."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from tests.models import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "llama", hidden_size=32, head_dim=8, intermediate_size=48)


@pytest.fixture(autouse=True)
def one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
