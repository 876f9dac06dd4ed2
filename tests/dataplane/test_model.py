"""A TransferQueuePlane answers any sequence of calls as a MemoryPlane does: rows, errors, and the keys that they name."""

from __future__ import annotations

from functools import partial

from dataplane.conformance.model import check_against_model
from dataplane.spec import PlaneSpec, connect
from tests.dataplane.backends import on_each_backend


@on_each_backend
def test_the_planes_agree(spec: PlaneSpec) -> None:
    check_against_model(partial(connect, spec), examples=30)
