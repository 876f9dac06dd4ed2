"""Every plane does what `dataplane.conformance` asks, and no server that stands still is more than its callers can bear."""

from __future__ import annotations

from functools import partial

import pytest

from dataplane.conformance.cases import CASES, Case
from dataplane.conformance.faults import FAULTS, Fault
from dataplane.memory import MemoryPlane
from dataplane.servers import Servers
from dataplane.transferqueue import TransferQueuePlane
from tests.dataplane.backends import on_each_backend
from tests.dataplane.faults import frozen, serving

pytestmark = pytest.mark.anyio
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)


@each_case
async def test_of_the_memory_plane(case: Case, partition: str) -> None:
    await case(MemoryPlane(), partition)


@on_each_backend
@each_case
async def test_of_the_transferqueue_plane(case: Case, plane: TransferQueuePlane, partition: str) -> None:
    await case(plane, partition)


@on_each_backend
@each_fault
async def test_of_the_transferqueue_plane_when_a_server_stands_still(
    fault: Fault, servers: Servers, plane: TransferQueuePlane, partition: str
) -> None:
    for server, pid in servers.pids.items():
        await fault(plane, f"{partition}, {server}", partial(frozen, serving(pid)))
