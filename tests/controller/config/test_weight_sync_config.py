"""Weight transports against engine, devices and workers: what cannot work is said before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller.config import engine as engine_rules
from controller.config.checks import Findings, check_config
from controller.config.load import ConfigError, load_config
from controller.config.plan import plan
from controller.config.weight_sync import weight_sync
from tests.controller.config.files import valid, write_config

GPUS = ["generation.engine=vllm", "generation.device=cuda:1", "training.device=cuda:0"]


def findings(tmp_path: Path, *overrides: str) -> Findings:
    path = write_config(tmp_path, json.dumps(valid(tmp_path)))
    return check_config(load_config(path, ["training.max_tokens_per_microbatch=512", *overrides]))


@pytest.fixture(autouse=True)
def vllm_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rules, "is_installed", lambda: True)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["weight_sync.transport=nccl"], "nccl is vLLM's transfer between GPUs, with generation.engine torch"),
        (
            ["weight_sync.transport=nccl", "generation.engine=vllm"],
            "nccl is vLLM's transfer between GPUs, with generation.device cpu",
        ),
        (["weight_sync.transport=ipc", *GPUS], "ipc with the engines on cuda:1 and the trainer on cuda:0"),
        (
            ["weight_sync.transport=ipc", *GPUS, "generation.device=cuda:0", "generation.workers=2"],
            "ipc with the engines on cuda:0 to cuda:1 and the trainer on cuda:0",
        ),
        (
            ["weight_sync.transport=nccl", *GPUS, "generation.device=cuda", "generation.vllm.tensor_parallel_size=2"],
            "nccl with the engines on cuda:0 to cuda:1 and the trainer on cuda:0",
        ),
        (["weight_sync.transport=no_such_module:Class"], "there is no module no_such_module"),
        (["weight_sync.transport=workers.environments.reverse_text:ReverseTex"], "did you mean: ReverseText"),
        (["weight_sync.mode=drain", "weight_sync.drain_timeout_s=120"], "drain_timeout_s: 120 >= 120"),
        (
            ["generation.engine=vllm", "generation.vllm.weight_transfer_config={}"],
            "generation.vllm.weight_transfer_config: is what weight_sync.transport says",
        ),
    ],
)
def test_what_cannot_work_is_named(tmp_path: Path, overrides: list[str], problem: str) -> None:
    assert problem in "\n".join(str(p) for p in findings(tmp_path, *overrides).problems)


@pytest.mark.parametrize(
    "overrides",
    [
        ["weight_sync.transport=gloo", "weight_sync.host=10.0.0.1", "generation.workers=2"],
        ["weight_sync.transport=nccl", *GPUS],
        ["weight_sync.transport=ipc", *GPUS, "generation.device=cuda:0"],
        ["weight_sync.transport=workers.weight_sync.file:FileTransport", "weight_sync.args.spec=1"],
        ["weight_sync.mode=drain", "weight_sync.drain_timeout_s=30"],
        ["weight_sync.mode=abort"],
    ],
)
def test_what_works_has_no_finding(tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(write_config(tmp_path, json.dumps(valid(tmp_path))), overrides)
    assert list(weight_sync(config)) == []


@pytest.mark.parametrize(
    ("override", "switch"),
    [
        ("weight_sync.args.x=1", "a transport of your own"),
        ("weight_sync.host=10.0.0.1", "transport gloo, nccl or ipc"),
        ("weight_sync.drain_timeout_s=3", "mode drain"),
    ],
)
def test_a_key_without_effect_is_a_warning(tmp_path: Path, override: str, switch: str) -> None:
    found = findings(tmp_path, override)
    assert not found.problems
    assert [p.allowed for p in found.warnings] == [f"nothing, unless weight_sync has {switch}"]


def test_a_name_that_is_no_transport_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path, json.dumps(valid(tmp_path)))
    with pytest.raises(ConfigError, match="file, gloo, nccl, ipc or module:Class"):
        load_config(path, ["weight_sync.transport=glooo"])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "file, keep: calls that are running go on with the new weights"),
        (
            ["weight_sync.transport=gloo", "weight_sync.mode=drain", "weight_sync.drain_timeout_s=30"],
            "gloo, drain: calls that are running end first, within 30 s",
        ),
    ],
)
def test_the_plan_says_how_weights_travel_and_what_becomes_of_running_calls(
    tmp_path: Path, overrides: list[str], says: str
) -> None:
    config = load_config(write_config(tmp_path, json.dumps(valid(tmp_path))), overrides)
    model = check_config(config).model
    assert model is not None
    assert says in plan(config, model)
