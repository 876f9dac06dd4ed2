"""One set of real servers for the whole package, and planes on it. Tests share the servers and never a partition."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Generator

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from dataplane.servers import LocalServers, start_servers
from dataplane.spec import PlaneSpec, connect
from dataplane.transferqueue import TransferQueuePlane

_numbers = itertools.count()


@pytest.fixture(scope="session")
def portal() -> Generator[BlockingPortal]:
    """An event loop on another thread, for what outlives a test."""
    with start_blocking_portal("asyncio") as portal:
        yield portal


@pytest.fixture(scope="session")
def servers(portal: BlockingPortal) -> Generator[LocalServers]:
    with portal.wrap_async_context_manager(start_servers(storage_units=2, timeout_s=120)) as servers:
        yield servers


@pytest.fixture(scope="session")
def spec(servers: LocalServers) -> PlaneSpec:
    return servers.spec


@pytest.fixture
async def plane(spec: PlaneSpec) -> AsyncGenerator[TransferQueuePlane]:
    plane = await connect(spec)
    assert isinstance(plane, TransferQueuePlane)
    yield plane
    await plane.aclose()


@pytest.fixture
def partition() -> str:
    return f"partition {next(_numbers)}"
