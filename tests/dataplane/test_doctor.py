"""The doctor finds a plane well that is, and of one that is not it says what is wrong, by name."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from dataplane.__main__ import main
from dataplane.servers import LocalServers
from dataplane.spec import PlaneSpec
from tests.dataplane.backends import on_each_backend, on_mooncake
from tests.dataplane.faults import frozen


def seen_at(address: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["doctor", "--address", address, *arguments])
    return code, capsys.readouterr().out


def wrong(spec: PlaneSpec, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code, out = seen_at(msgspec.json.encode(spec).decode(), capsys, *arguments)
    assert code == 1
    [problem] = [line.removeprefix("WRONG").strip() for line in out.splitlines() if line.startswith("WRONG")]
    return problem


@on_each_backend
def test_a_plane_that_is_well(spec: PlaneSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dataplane.json"
    file.write_bytes(msgspec.json.encode(spec))
    code, out = seen_at(str(tmp_path), capsys)
    assert code == 0
    assert "nothing is wrong" in out
    for seen in (
        "TransferQueue 0.1.11",
        f"{spec.backend}: 1 controller",
        "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS = 3",
        "median",
    ):
        assert seen in out
    assert all(server.id in out for server in spec.servers)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("nowhere/dataplane.json", "there is no file"),
        ("{}", "is not a data plane's address: Object missing required field `controller`"),
        ('{"controller": 1}', "Expected `object`, got `int`"),
        ("", "the address is empty"),
        (str(Path(__file__).parent), "there is no file"),  # a folder in which no run goes on
        (f"{__file__}/dataplane.json", "cannot read"),
        ("ray:head", "ray:head is no Ray address: 'head' is neither auto nor HOST:PORT"),
        ("ray:head:1/a b", "'a b' is no namespace"),
        ("ray:[::1]:1", "no Ray cluster answers at [::1]:1"),
        ("ray:127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_an_address_that_is_none(address: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = seen_at(address, capsys)
    assert code == 1
    assert says in out


@on_each_backend
def test_an_address_with_a_mistake_in_it(spec: PlaneSpec, capsys: pytest.CaptureFixture[str]) -> None:
    controller, storage = spec.controller, spec.storage[0]
    for says, mistaken in {
        "has no port handshake_socket": {"controller": replace(controller, ports={"request_handle_socket": 1})},
        "as a storage server of": {"storage": (replace(storage, ports={}), *spec.storage[1:])},
        "Expected `int` <= 65535": {"storage": (replace(storage, ports={"life": 99999}), *spec.storage[1:])},
        "stands where a controller server is expected": {"controller": storage},
        "stands where a storage server is expected": {"storage": (controller,)},
        "one of its servers is named twice": {"storage": (storage, storage)},
    }.items():
        assert says in wrong(replace(spec, **mistaken), capsys)


def test_a_server_that_is_gone(spec: PlaneSpec, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    dead = replace(spec.storage[0], id="the dead one", ports={"put_get_socket": port})
    problem = wrong(replace(spec, storage=(dead, *spec.storage[1:])), capsys)
    assert "storage server the dead one" in problem
    assert "it was stopped or killed, or the address is of another machine or an older run" in problem


def test_a_server_of_another_kind(spec: PlaneSpec, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports = dict.fromkeys(spec.controller.ports, listener.getsockname()[1])
        other = replace(spec.controller, ports=ports)
        problem = wrong(replace(spec, controller=other), capsys)
    assert f"no answer from the data plane's controller server {spec.controller.id}" in problem


@on_mooncake
def test_another_program_at_the_masters_port(spec: PlaneSpec, capsys: pytest.CaptureFixture[str]) -> None:
    assert spec.mooncake is not None
    master = spec.mooncake.master
    other = replace(master, ports={**master.ports, "rpc": master.ports["admin"]})
    problem = wrong(replace(spec, mooncake=replace(spec.mooncake, master=other)), capsys)
    assert f"no answer from {other}" in problem


def test_a_server_that_stands_still(servers: LocalServers, capsys: pytest.CaptureFixture[str]) -> None:
    with frozen(servers.pids["storage unit 1"]):
        problem = wrong(servers.spec, capsys, "--timeout", "0.5")
    assert f"no answer from the data plane's storage server {servers.spec.storage[1].id}" in problem


def test_servers_of_another_version(spec: PlaneSpec, capsys: pytest.CaptureFixture[str]) -> None:
    older = replace(spec.controller, software="TransferQueue 0.1.9")
    problem = wrong(replace(spec, controller=older), capsys)
    assert "runs TransferQueue 0.1.9, but here it is 0.1.11: install the same version on both machines" in problem


def test_a_setting_of_the_environment_is_pointed_out(
    spec: PlaneSpec, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS", "7")
    _, out = seen_at(json.dumps(msgspec.to_builtins(spec)), capsys)
    assert "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS = 7, from the environment (else 3)" in out


def test_a_bad_command_line() -> None:
    for arguments in (
        ["doctor", "--timeout", "0"],
        ["doctor", "--timeout", "nan"],
        ["doctor", "--backend", "redis"],
        [],
    ):
        with pytest.raises(SystemExit) as raised:
            main(arguments)
        assert raised.value.code == 2
