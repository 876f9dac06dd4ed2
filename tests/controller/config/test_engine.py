"""What is said of the generation engine before anything starts: is it there, and does it know the arguments?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller.config import engine
from controller.config.checks import Findings, check_config
from controller.config.load import load_config
from controller.specs import generation_spec
from dataplane.spec import PlaneSpec, ServerAddress
from tests.controller.config.files import valid, write_config
from tests.needs import needs_vllm

PLANE = PlaneSpec(controller=ServerAddress("controller", "c", "127.0.0.1", {}), storage=())


def findings(tmp_path: Path, *overrides: str) -> Findings:
    path = write_config(tmp_path, json.dumps(valid(tmp_path)))
    return check_config(load_config(path, list(overrides)))


@needs_vllm
def test_every_engine_argument_may_be_set_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    arguments = {"tensor_parallel_size": 1, "kv_cache_memory_bytes": 1 << 26, "load_format": "safetensors"}
    vllm = "generation.engine=vllm"
    assert not findings(tmp_path, vllm, f"generation.vllm={json.dumps(arguments)}").problems
    wrong = {
        "tensor_paralel_size": 2,
        "max_num_seqs": 8,
        "logprobs_mode": "raw_logprobs",
        "load_format": "dummy",
        "zzz": 1,
    }
    found = findings(tmp_path, vllm, f"generation.vllm={json.dumps(wrong)}").problems
    assert [(p.path, p.nearest) for p in found] == [
        ("generation.vllm.tensor_paralel_size", "generation.vllm.tensor_parallel_size"),
        ("generation.vllm.max_num_seqs", None),
        ("generation.vllm.logprobs_mode", None),
        ("generation.vllm.load_format", None),
        ("generation.vllm.zzz", None),
    ]
    assert found[1].allowed == "set generation.max_batch"
    assert "'processed_logprobs'" in found[2].allowed


def test_vllm_that_is_not_installed_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "is_installed", lambda: False)
    (problem,) = findings(tmp_path, "generation.engine=vllm").problems
    assert (problem.path, problem.what) == ("generation.engine", "vllm is not installed")
    assert "make vllm" in problem.remedy


def test_a_temperature_that_vllm_would_raise_is_refused(tmp_path: Path) -> None:
    low = ["rollout.temperature=0.001", "evaluation.temperature=0.009"]
    assert not findings(tmp_path, *low).problems
    found = findings(tmp_path, "generation.engine=vllm", *low).problems
    assert [p.path for p in found if "temperature" in p.path] == ["rollout.temperature", "evaluation.temperature"]


def test_arguments_of_another_engine_have_no_effect(tmp_path: Path) -> None:
    found = findings(tmp_path, 'generation.vllm={"block_size": 16}')
    assert not found.problems
    assert [p.path for p in found.warnings] == ["generation.vllm"]


@pytest.mark.parametrize(
    ("device", "arguments", "gpus"),
    [
        ("cpu", {"tensor_parallel_size": 2}, [(), ()]),
        ("cuda", {}, [(0,), (1,)]),
        ("cuda:1", {"tensor_parallel_size": 2}, [(1, 2), (3, 4)]),
        ("cuda:2", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, [(2, 3, 4, 5), (6, 7, 8, 9)]),
    ],
)
def test_workers_take_the_gpus_that_follow_one_another(
    tmp_path: Path, device: str, arguments: dict[str, int], gpus: list[tuple[int, ...]]
) -> None:
    overrides = ["generation.engine=vllm", f"generation.device={device}", f"generation.vllm={json.dumps(arguments)}"]
    config = load_config(write_config(tmp_path, json.dumps(valid(tmp_path))), overrides)
    assert [generation_spec(config, PLANE, index).engine.gpus for index in range(2)] == gpus
