"""The packages a data plane runs on: which version is here, and what is missing. Imports none of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from importlib import import_module, metadata, util
from typing import Any

from dataplane.errors import DataPlaneDown
from dataplane.spec import ServerAddress

TRANSFER_QUEUE = "TransferQueue"
MOONCAKE = "mooncake"
_DISTRIBUTIONS = {MOONCAKE: ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")}
"""Mooncake goes by one name for machines with CUDA and by another for those without; both bring the package `mooncake`."""


def running(package: str) -> str:
    """What a server of this process's interpreter says that it runs, as "package version"."""
    return f"{package} {version(package)}"


def version(package: str) -> str:
    """The installed version of a package; "not installed"."""
    for name in _DISTRIBUTIONS.get(package, (package,)):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def mooncake_problem() -> str | None:
    """Why MooncakeStore cannot be used on this machine, and what to do about it."""
    if util.find_spec(MOONCAKE) is None:
        return "the package mooncake is not installed: pip install 'monoloop[mooncake]'"
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return (
            "the system library libibverbs.so.1, which mooncake is linked with, is missing: install your distribution's "
            "package (Debian, Ubuntu: apt-get install libibverbs1; Fedora: dnf install libibverbs)"
        )
    return None


def mooncake_store() -> Any:
    """Mooncake's module, which has no types."""
    return import_module("mooncake.store")


def ray_problem() -> str | None:
    """Why no Ray cluster can be joined from this machine."""
    return None if util.find_spec("ray") else "the package ray is not installed: pip install 'monoloop[ray]'"


def require_same(servers: Iterable[ServerAddress]) -> None:
    """Raise DataPlaneDown unless the servers run the versions that are installed here: their wire formats change freely."""
    for server in servers:
        package, _, theirs = server.software.partition(" ")
        if package and (ours := version(package)) != theirs:
            raise DataPlaneDown(
                f"{server} runs {package} {theirs}, but here it is {ours}: install the same version on both machines"
            )
