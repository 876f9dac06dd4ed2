"""A TransferQueuePlane answers any sequence of calls as a MemoryPlane does: rows, errors, and the keys that they name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, ClassVar

import numpy as np
import pytest
from anyio.from_thread import BlockingPortal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from dataplane.errors import DataPlaneError
from dataplane.memory import MemoryPlane
from dataplane.plane import DataPlane
from dataplane.spec import PlaneSpec, connect

KEYS = st.lists(st.sampled_from("abcdef"), max_size=4)
COLUMNS = st.lists(st.sampled_from("xyz"), min_size=1, unique=True)
COLUMN = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@st.composite
def puts(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    columns = draw(COLUMNS)
    dtypes = {name: draw(st.sampled_from(["int64", "int64", "int64", "float32"])) for name in columns}
    keys = draw(KEYS)
    return {key: {name: np.array(draw(COLUMN), dtypes[name]) for name in columns} for key in keys}


class Both(RuleBasedStateMachine):
    portal: ClassVar[BlockingPortal]
    real: ClassVar[DataPlane]
    runs: ClassVar[int] = 0

    @initialize()
    def start_with_an_empty_partition(self) -> None:
        type(self).runs += 1
        self.partition = f"model {self.runs}"
        self.model = MemoryPlane()

    @rule(rows=puts())
    def put(self, rows: dict[str, dict[str, Any]]) -> None:
        self.compare(lambda plane: plane.put(self.partition, rows))

    @rule(keys=KEYS, columns=COLUMNS)
    def get(self, keys: list[str], columns: list[str]) -> None:
        self.compare(lambda plane: plane.get(self.partition, keys, columns))

    @rule(keys=KEYS)
    def clear(self, keys: list[str]) -> None:
        self.compare(lambda plane: plane.clear(self.partition, keys))

    @invariant()
    def the_same_keys_are_there(self) -> None:
        if hasattr(self, "model"):
            self.compare(lambda plane: plane.keys(self.partition))

    def compare(self, call: Callable[[DataPlane], Awaitable[object]]) -> None:
        assert self.outcome(call, self.real) == self.outcome(call, self.model)

    def outcome(self, call: Callable[[DataPlane], Awaitable[object]], plane: DataPlane) -> object:
        try:
            return plain(self.portal.call(call, plane))
        except DataPlaneError as error:
            return type(error), sorted(getattr(error, "keys", ()))


def plain(result: Any) -> object:
    """Arrays as something that == compares, dtype included."""
    if isinstance(result, np.ndarray):
        return result.dtype, result.tolist()
    if isinstance(result, list):
        return [plain(item) for item in result]
    if isinstance(result, dict):
        return {key: plain(value) for key, value in result.items()}
    return result


@pytest.fixture
def real(portal: BlockingPortal, spec: PlaneSpec) -> Generator[DataPlane]:
    plane = portal.call(connect, spec)
    yield plane
    portal.call(plane.aclose)


def test_the_planes_agree(portal: BlockingPortal, real: DataPlane) -> None:
    Both.portal, Both.real = portal, real
    limits = settings(
        max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    run_state_machine_as_test(Both, settings=limits)
