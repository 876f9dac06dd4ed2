"""A tiny random model and a small configuration that trains it in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def config(model_dir: Path) -> dict[str, Any]:
    return {
        "run": {"dir": "run", "steps": 3},
        "model": {"path": str(model_dir)},
        "environment": {"name": "reverse_text"},
        "rollout": {"groups_per_step": 2, "group_size": 4, "max_tokens": 12},
        "training": {"optimizer": {"lr": 1e-3}},
    }
