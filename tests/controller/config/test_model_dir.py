"""A model directory's facts come from its headers, and what is missing or damaged in it is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.config.model_dir import inspect_model
from tests.controller.config.files import write_model, write_safetensors


def test_the_facts_of_a_sound_directory(tmp_path: Path) -> None:
    facts, faults = inspect_model(write_model(tmp_path))
    assert faults == []
    assert facts is not None
    assert (facts.architecture, facts.context, facts.parameters) == ("LlamaForCausalLM", 512, 12)


def test_shards_are_counted_by_the_index_and_a_stray_file_is_not(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_safetensors(tmp_path / "a-1-of-2.safetensors", 5)
    write_safetensors(tmp_path / "a-2-of-2.safetensors", 2, 2)
    index = {"weight_map": {"x": "a-1-of-2.safetensors", "y": "a-2-of-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    facts, faults = inspect_model(tmp_path)
    assert faults == []
    assert facts is not None
    assert facts.parameters == 9


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": None, "n_positions": 1024}, 1024),
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_the_context_is_read_from_where_the_families_keep_it(
    tmp_path: Path, config: dict[str, int], context: int
) -> None:
    facts, _ = inspect_model(write_model(tmp_path, **config))
    assert facts is not None
    assert facts.context == context


def lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lost_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors"}}')


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (
            lambda f: (f / "config.json").write_text("{"),
            "has a config.json that cannot be read: Input data was truncated",
        ),
        (
            lambda f: (f / "config.json").write_text('{"max_position_embeddings": "x"}'),
            "has a config.json that cannot be",
        ),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda f: (f / "chat_template.jinja").unlink(), "has no chat template"),
        (pickled, "has no *.safetensors (pickled weights are not loaded)"),
        (lfs_pointer, "has a damaged model.safetensors: its 63 bytes are not safetensors"),
        (truncate, "has a damaged model.safetensors: it has "),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "has a damaged model.safetensors: its 0 bytes"),
        (lost_shard, "has no a.safetensors, which its index names"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text("[]"),
            "has a model.safetensors.index.json that cannot",
        ),
    ],
)
def test_a_fault_is_named(tmp_path: Path, damage: Callable[[Path], None], what: str) -> None:
    damage(write_model(tmp_path))
    _, (fault,) = inspect_model(tmp_path)
    assert fault.what.startswith(what)


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    facts, faults = inspect_model(tmp_path)
    assert facts is None
    assert [f.what.split(" (")[0] for f in faults] == ["has no *.safetensors", "has no config.json", "has no tokenizer"]


def test_a_chat_template_may_stand_in_the_tokenizer_config(tmp_path: Path) -> None:
    (write_model(tmp_path) / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert inspect_model(tmp_path)[1] == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@given(st.binary(max_size=64), st.integers(0, 200))
@settings(max_examples=100, deadline=None)
def test_no_weights_file_makes_it_fail(model: Path, noise: bytes, at: int) -> None:
    write_safetensors(model / "model.safetensors", 3, 4)
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:at] + noise + content[at + len(noise) :])
    facts, faults = inspect_model(model)
    assert (facts is None) == bool(faults)
