"""What a data plane's address may look like on a command line, and the spec that it stands for."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dataplane.errors import DataPlaneDown
from dataplane.ray_settings import RaySettings
from dataplane.spec import PlaneSpec

KINDS = """\
a run's file (<run.dir>/dataplane.json, while it lasts), the same as JSON text, or ray:HOST:PORT or ray:auto for the plane \
that runs in a Ray cluster; ray:HOST:PORT/NAMESPACE if not in namespace monoloop"""


def resolve(address: str, *, token_file: str | None = None) -> PlaneSpec:
    """Blocks: reads a file, or joins a Ray cluster (never starts one). Raises DataPlaneDown that says what is wrong."""
    if address.startswith("ray:"):
        return _in_ray(address, token_file)
    if address.lstrip().startswith("{"):
        return _decode(address.encode(), "the text")
    path = Path(address)
    try:
        return _decode(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise DataPlaneDown(f"there is no file {path.absolute()}. An address is {KINDS}") from None
    except OSError as error:
        raise DataPlaneDown(f"cannot read {path}: {error}") from error


def _decode(text: bytes, where: str) -> PlaneSpec:
    try:
        return msgspec.json.decode(text, type=PlaneSpec)
    except msgspec.DecodeError as error:
        raise DataPlaneDown(f"{where} is not a data plane's address: {error}. An address is {KINDS}") from None


def _in_ray(address: str, token_file: str | None) -> PlaneSpec:
    where, _, namespace = address.removeprefix("ray:").partition("/")
    try:
        settings = msgspec.convert(
            {"address": where, "token_file": token_file} | ({"namespace": namespace} if namespace else {}), RaySettings
        )
    except msgspec.ValidationError as error:
        raise DataPlaneDown(f"{address} is no Ray address: {error}. An address is {KINDS}") from None
    from dataplane.ray_driver import Failure, find

    try:
        return find(settings)
    except Failure as failure:
        raise DataPlaneDown(str(failure)) from failure
