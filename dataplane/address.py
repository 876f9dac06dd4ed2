"""What a data plane's address may look like on a command line, and the spec that it stands for."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from dataplane.errors import DataPlaneDown
from dataplane.ray_settings import RaySettings
from dataplane.spec import PlaneSpec

KINDS = """\
a run's folder (or the dataplane.json in it, there while the run lasts), the same as JSON text, or ray:HOST:PORT or \
ray:auto for the plane that runs in a Ray cluster; ray:HOST:PORT/NAMESPACE if not in namespace monoloop"""


def resolve(address: str, *, token_file: str | None = None) -> PlaneSpec:
    """Blocks: reads a file, or joins a Ray cluster (never starts one). Raises DataPlaneDown that says what is wrong."""
    if address.startswith("ray:"):
        return _in_ray(address, token_file)
    if not address.strip():
        raise DataPlaneDown(f"the address is empty. An address is {KINDS}")
    if address.lstrip().startswith("{"):
        return _decode(address.encode(errors="surrogateescape"), "the text")
    path = Path(address)
    try:
        if path.is_dir():
            path /= "dataplane.json"
        return _decode(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise DataPlaneDown(f"there is no file {path.absolute()}. An address is {KINDS}") from None
    except OSError as error:
        raise DataPlaneDown(f"cannot read {path}: {error}") from error


def _decode(text: bytes, where: str) -> PlaneSpec:
    try:
        spec = msgspec.json.decode(text, type=PlaneSpec)
        _check(spec)
    except (msgspec.DecodeError, ValueError) as error:
        raise DataPlaneDown(f"{where} is not a data plane's address: {error}. An address is {KINDS}") from None
    return spec


def _check(spec: PlaneSpec) -> None:
    """Raise ValueError unless each server is of its place's kind, has the ports that it is asked on, and is there once."""
    places = [("controller", spec.controller, ["handshake_socket", "request_handle_socket"])]
    if spec.mooncake is not None:
        places.append(("master", spec.mooncake.master, ["rpc", "admin", "life"]))
    kept_in = "put_get_socket" if spec.mooncake is None else "life"
    places.extend(("storage", server, [kept_in]) for server in spec.storage)
    for role, server, ports in places:
        if server.role != role:
            raise ValueError(f"{server} stands where a {role} server is expected")
        if lacking := sorted(set(ports) - set(server.ports)):
            raise ValueError(f"{server} has no port {', '.join(lacking)}, as a {role} server of {spec.backend} has")
    if len({server.id for server in spec.servers}) < len(spec.servers):
        raise ValueError("one of its servers is named twice")


def _in_ray(address: str, token_file: str | None) -> PlaneSpec:
    where, _, namespace = address.removeprefix("ray:").partition("/")
    try:
        settings = msgspec.convert(
            {"address": where, "token_file": token_file} | ({"namespace": namespace} if namespace else {}), RaySettings
        )
    except msgspec.ValidationError as error:
        told = {
            "`$.address`": f"{where!r} is neither auto nor HOST:PORT",
            "`$.namespace`": f"{namespace!r} is no namespace, which has letters, digits, '.', '_' and '-'",
            "`$.token_file`": "the token's file has an empty name",
        }[str(error).rpartition(" ")[2]]
        raise DataPlaneDown(f"{address} is no Ray address: {told}. An address is {KINDS}") from None
    # Ray reads it while it is imported.
    os.environ.update(settings.environment())
    from dataplane.ray_driver import Failure, find

    try:
        return find(settings)
    except Failure as failure:
        raise DataPlaneDown(str(failure)) from failure
