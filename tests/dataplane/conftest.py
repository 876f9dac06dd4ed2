"""One set of real servers for the whole package, and planes on it. Tests share the servers and never a partition."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Generator

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from dataplane.servers import Servers
from dataplane.spec import PlaneSpec, connect
from dataplane.transferqueue import TransferQueuePlane
from tests.dataplane.backends import BACKENDS, Backend

_numbers = itertools.count()


@pytest.fixture(scope="session")
def portal() -> Generator[BlockingPortal]:
    """An event loop on another thread, for what outlives a test."""
    with start_blocking_portal("asyncio") as portal:
        yield portal


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


@pytest.fixture(scope="session")
def servers(portal: BlockingPortal, backend: Backend) -> Generator[Servers]:
    with portal.wrap_async_context_manager(backend.servers()) as servers:
        yield servers


@pytest.fixture(scope="session")
def bare_servers(portal: BlockingPortal, backend: Backend) -> Generator[Servers]:
    """As TransferQueue comes: to show what it does by itself."""
    with portal.wrap_async_context_manager(backend.bare_servers()) as servers:
        yield servers


@pytest.fixture
def spec(servers: Servers) -> PlaneSpec:
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
