"""The storages that a plane is tested on: servers as a run starts them, and as TransferQueue comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from dataplane import software
from dataplane.servers import LocalServers, Servers, start_servers
from dataplane.spec import ServerAddress
from dataplane.topology import TRANSFER_QUEUE, MooncakeSettings, Topology

STORAGE_UNITS = 2
START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Backend:
    name: str
    mooncake: MooncakeSettings | None = None

    def servers(self, **options: Any) -> Servers:
        return start_servers(storage_units=STORAGE_UNITS, timeout_s=START_TIMEOUT_S, mooncake=self.mooncake, **options)

    def bare_servers(self) -> Servers:
        return BareServers(Topology(storage_units=STORAGE_UNITS, mooncake=self.mooncake), START_TIMEOUT_S, "127.0.0.1")


class BareServers(LocalServers):
    async def launch(self, name: str, module: str, arguments: Sequence[str]) -> ServerAddress:
        bare = "tests.dataplane.bare_server" if module == TRANSFER_QUEUE else module
        return await super().launch(name, bare, arguments)


SIMPLE = pytest.param(Backend("simple"), id="simple")
_problem = software.mooncake_problem()
_mooncake = Backend("mooncake", MooncakeSettings(memory_mb=256))
_marks = (pytest.mark.skipif(_problem is not None, reason=_problem or ""),)
MOONCAKE = pytest.param(_mooncake, id="mooncake", marks=_marks)
MOONCAKE_LONG = pytest.param(_mooncake, id="mooncake", marks=(*_marks, pytest.mark.long))
BACKENDS = [SIMPLE]
"""What a test runs on that does not say otherwise."""

on_each_backend = pytest.mark.parametrize("backend", [SIMPLE, MOONCAKE], indirect=True, scope="session")
on_mooncake = pytest.mark.parametrize("backend", [MOONCAKE], indirect=True, scope="session")
on_each_backend_in_time = pytest.mark.parametrize("backend", [SIMPLE, MOONCAKE_LONG], indirect=True, scope="session")
"""On MooncakeStore with the long tests: each client of it takes a second to come and go."""
