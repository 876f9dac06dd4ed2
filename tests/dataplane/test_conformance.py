"""Both planes do what conformance.py asks."""

from __future__ import annotations

import pytest

from dataplane.memory import MemoryPlane
from dataplane.transferqueue import TransferQueuePlane
from tests.dataplane.conformance import CASES, Case

pytestmark = pytest.mark.anyio
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


@each_case
async def test_of_the_memory_plane(case: Case, partition: str) -> None:
    await case(MemoryPlane(), partition)


@each_case
async def test_of_the_transferqueue_plane(case: Case, plane: TransferQueuePlane, partition: str) -> None:
    await case(plane, partition)
