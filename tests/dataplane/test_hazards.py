"""What TransferQueue does to its users by itself, and what the plane makes of it: impossible, or an error."""

from __future__ import annotations

import msgspec
import pytest
from transfer_queue.storage.managers import simple_storage_manager

from dataplane.servers import Servers
from tests.dataplane.backends import Backend, on_each_backend_in_time
from tests.dataplane.hazards import DEADLINE_S, HAZARDS, Hazard, World
from tests.dataplane.parties import bare, planes

pytestmark = pytest.mark.anyio
ATTEMPTS = 5
each_hazard = pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.name)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simple_storage_manager, "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", int(DEADLINE_S))


@on_each_backend_in_time
@each_hazard
async def test_the_plane_keeps_its_word(hazard: Hazard, servers: Servers, partition: str) -> None:
    async with planes(msgspec.structs.replace(servers.spec, timeout_s=DEADLINE_S)) as (one, other):
        await hazard.happen(World(one, other, servers, partition))


@on_each_backend_in_time
@each_hazard
async def test_transferqueue_by_itself_does_not(
    hazard: Hazard, backend: Backend, bare_servers: Servers, partition: str
) -> None:
    if backend.name not in hazard.bare_on:
        pytest.skip(f"{backend.name} is safe from it")
    # Some need a server to do one thing before another, which it does not each time.
    for attempt in range(ATTEMPTS):
        async with bare(bare_servers.spec) as (one, other):
            try:
                await hazard.happen(World(one, other, bare_servers, f"{partition} {attempt}"))
            except AssertionError:
                return
    pytest.fail(f"it kept its word {ATTEMPTS} times")
