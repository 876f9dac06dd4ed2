"""The rules of the data plane's section."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller.config.checks import Findings, check_config
from controller.config.load import load_config
from controller.config.plan import plan
from controller.config.problems import ConfigError
from dataplane import software
from tests.controller.config.files import valid, write_config


def findings(tmp_path: Path, *overrides: str) -> Findings:
    path = write_config(tmp_path, json.dumps(valid(tmp_path)))
    return check_config(load_config(path, list(overrides)))


def test_a_missing_package_is_named_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.util, "find_spec", lambda _: None)
    found = findings(tmp_path, "dataplane.backend=mooncake", "dataplane.servers=ray")
    backend, servers = (problem for problem in found.problems if problem.path.startswith("dataplane"))
    assert backend.path == "dataplane.backend"
    assert (backend.what, backend.remedy) == (
        "mooncake, but the package mooncake is not installed",
        "pip install 'monoloop[mooncake]'",
    )
    assert (servers.path, servers.remedy) == ("dataplane.servers", "pip install 'monoloop[ray]'")


def test_a_missing_system_library_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(software.util, "find_spec", lambda name: name)
    monkeypatch.setattr(software.ctypes, "CDLL", missing)
    (problem,) = findings(tmp_path, "dataplane.backend=mooncake").problems
    assert "libibverbs.so.1" in problem.what
    assert "apt-get install libibverbs1" in (problem.remedy or "")


def test_rows_must_fit_into_mooncake_and_mooncake_into_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "mooncake_problem", lambda: None)
    mooncake = ["dataplane.backend=mooncake", "rollout.groups_per_step=64", "generation.max_model_len=512"]
    small, large = "dataplane.mooncake.memory_mb=16", "dataplane.mooncake.memory_mb=100000000"
    assert not [w for w in findings(tmp_path, *mooncake).warnings if w.path.startswith("dataplane")]
    (warning,) = [w for w in findings(tmp_path, *mooncake, small).warnings if w.path.startswith("dataplane")]
    assert (warning.path, warning.what) == ("dataplane.mooncake.memory_mb", "16 x 1 storage units = 16 MiB")
    assert ">= 21 MiB" in (warning.allowed or "")
    (problem,) = findings(tmp_path, *mooncake, large).problems
    assert problem.path == "dataplane.mooncake.memory_mb"
    elsewhere = findings(tmp_path, *mooncake, large, "dataplane.servers=ray")
    assert not elsewhere.problems


def test_more_storage_processes_than_the_machine_has_memory_for_are_refused(tmp_path: Path) -> None:
    (problem,) = findings(tmp_path, "dataplane.storage_units=100000").problems
    assert problem.path == "dataplane.storage_units"
    assert not findings(tmp_path, "dataplane.storage_units=100000", "dataplane.servers=ray").problems


def test_rdma_devices_have_no_effect_over_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "mooncake_problem", lambda: None)
    devices = ["dataplane.backend=mooncake", "dataplane.mooncake.devices=mlx5_0"]
    (warning,) = [w for w in findings(tmp_path, *devices).warnings if w.path.startswith("dataplane")]
    assert warning.path == "dataplane.mooncake.devices"
    assert not [
        w for w in findings(tmp_path, *devices, "dataplane.mooncake.protocol=rdma").warnings if w.path == warning.path
    ]


def test_a_token_file_must_be_readable(tmp_path: Path) -> None:
    ray = ["dataplane.servers=ray", f"dataplane.ray.token_file={tmp_path}/token"]
    (problem,) = findings(tmp_path, *ray).problems
    assert problem.path == "dataplane.ray.token_file"
    (tmp_path / "token").write_text("secret")
    assert not findings(tmp_path, *ray).problems


def test_a_section_without_its_backend_is_warned_of(tmp_path: Path) -> None:
    found = findings(tmp_path, "dataplane.mooncake.memory_mb=64", "dataplane.ray.cpus_per_server=0.5")
    assert not found.problems
    assert [w.path for w in found.warnings if w.what == "has no effect"] == ["dataplane.mooncake", "dataplane.ray"]


@pytest.mark.parametrize(
    "override",
    [
        "dataplane.backend=redis",
        "dataplane.servers=kubernetes",
        "dataplane.ray.address=ray://head:10001",
        "dataplane.ray.placement=anywhere",
        "dataplane.mooncake.memory_mb=1",
        "dataplane.mooncake.protocol=udp",
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        findings(tmp_path, override)


def test_the_plan_says_what_keeps_the_rows_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "mooncake_problem", lambda: None)
    overrides = ["dataplane.backend=mooncake", "dataplane.servers=ray", "dataplane.ray.address=head:6379"]
    path = write_config(tmp_path, json.dumps(valid(tmp_path)))
    config = load_config(path, overrides)
    model = check_config(config).model
    assert model is not None
    assert "rows in MooncakeStore over tcp: 1 master, 1 storage unit of 1,024 MiB, in the Ray cluster at head:6379" in (
        plan(config, model)
    )
