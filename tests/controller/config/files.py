"""Writes the files that configurations are about: a model directory of a few bytes, and a configuration that uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from controller.config.schema import Config, EnvironmentConfig, ModelConfig, RolloutConfig, RunConfig


def write_safetensors(path: Path, *shape: int) -> None:
    size = 4
    for n in shape:
        size *= n
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}, "__metadata__": {}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


def write_model(folder: Path, **config: Any) -> Path:
    """A directory with everything a model needs but sense: 12 parameters, a context of 512."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512, **config}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    write_safetensors(folder / "model.safetensors", 3, 4)
    return folder


def valid(tmp_path: Path) -> dict[str, Any]:
    """A configuration without problems or warnings, as plain values."""
    return {
        "run": {"dir": str(tmp_path / "run"), "steps": 10},
        "model": {"path": str(write_model(tmp_path / "model"))},
        "environment": {"name": "reverse_text"},
        "rollout": {"max_tokens": 16},
    }


def valid_config(tmp_path: Path) -> Config:
    """The same, as a Config."""
    return Config(
        run=RunConfig(dir=str(tmp_path / "run"), steps=10),
        model=ModelConfig(path=str(write_model(tmp_path / "model"))),
        environment=EnvironmentConfig(name="reverse_text"),
        rollout=RolloutConfig(max_tokens=16),
    )


def write_config(tmp_path: Path, text: str, name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path
