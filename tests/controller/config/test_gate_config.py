"""The rules of the gate's section, and where it listens."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path

import pytest

from controller.config.checks import Findings, check_config
from controller.config.load import load_config
from controller.config.problems import ConfigError
from controller.config.schema import GateConfig
from controller.gateway import GateAddressError, control_file, open_listener
from tests.controller.config.files import valid, write_config


def findings(tmp_path: Path, *overrides: str) -> Findings:
    path = write_config(tmp_path, json.dumps(valid(tmp_path)))
    return check_config(load_config(path, list(overrides)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_address_needs_one_that_agents_can_be_told(tmp_path: Path, host: str) -> None:
    (problem,) = findings(tmp_path, f"gate.host={json.dumps(host)}").problems
    assert (problem.path, problem.what) == ("gate.public_url", f"is null with gate.host {host}")
    public = ["gate.public_url=https://gate.example:8443", "gate.port=8443"]
    assert not findings(tmp_path, f"gate.host={json.dumps(host)}", *public).problems


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("gate.public_url=http://a:1", "gate.port"),
        ("gate.sampling=request", "gate.sampling"),
        ("gate.max_open_rollouts=255", "gate.max_open_rollouts"),
        ("gate.max_connections=255", "gate.max_connections"),
    ],
)
def test_what_may_be_meant_is_only_warned_of(tmp_path: Path, override: str, path: str) -> None:
    found = findings(tmp_path, override)
    assert not found.problems
    assert path in [warning.path for warning in found.warnings]


@pytest.mark.parametrize(
    "override", ["gate.port=70000", "gate.public_url=gate:1", "gate.max_body_bytes=10000000", "gate.sampling=free"]
)
def test_values_out_of_range_are_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        findings(tmp_path, override)


@pytest.mark.anyio
async def test_a_listener_has_the_address_that_agents_are_told() -> None:
    async with open_listener(GateConfig()) as listener:
        assert listener.url == f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        with pytest.raises(GateAddressError, match=r"cannot listen on 127\.0\.0\.1 port \d+: .*0 takes one"):
            async with open_listener(GateConfig(port=listener.socket.getsockname()[1])):
                raise AssertionError
    async with open_listener(GateConfig(public_url="https://gate.example/")) as listener:
        assert listener.url == "https://gate.example"
    with pytest.raises(GateAddressError):
        async with open_listener(GateConfig(host="no.such.host.invalid")):
            raise AssertionError


@pytest.mark.anyio
@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
async def test_an_ipv6_address_is_written_in_brackets() -> None:
    async with open_listener(GateConfig(host="::1")) as listener:
        assert listener.url.startswith("http://[::1]:")


def test_the_control_file_is_its_owner_s_and_goes_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    path.write_text("of a run that was killed")
    path.chmod(0o644)
    with control_file(tmp_path, "http://a:1", "secret"):
        assert json.loads(path.read_text()) == {"address": "http://a:1", "token": "secret"}
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == []
