"""A plane answers any sequence of calls as `MemoryPlane` does: with the same rows, errors, and keys that the errors name."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any, cast

import numpy as np
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from dataplane.errors import DataPlaneError
from dataplane.memory import MemoryPlane
from dataplane.plane import DataPlane

Call = Callable[[DataPlane], Awaitable[object]]

KEYS = st.lists(st.sampled_from("abcdef"), max_size=4)
COLUMNS = st.lists(st.sampled_from("xyz"), min_size=1, unique=True)
COLUMN = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def check_against_model(make: Callable[[], Awaitable[DataPlane]], *, examples: int = 40, steps: int = 25) -> None:
    """Make a plane, hold it against the model with random sequences of calls, and close it.

    Raises AssertionError with the shortest sequence that shows a difference. Uses partitions named "model ...".
    """
    limits = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    with start_blocking_portal("asyncio") as portal:
        plane = portal.call(make)
        try:
            run_state_machine_as_test(_machine(portal, plane), settings=limits)  # type: ignore[no-untyped-call]
        finally:
            portal.call(plane.aclose)


def _machine(portal: BlockingPortal, real: DataPlane) -> type[RuleBasedStateMachine]:
    numbers = itertools.count()

    class Both(RuleBasedStateMachine):
        @initialize()
        def start_with_an_empty_partition(self) -> None:
            self.partition = f"model {id(real)} {next(numbers)}"
            self.model = MemoryPlane()

        @rule(rows=_puts())
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

        def compare(self, call: Call) -> None:
            assert _outcome(portal, call, real) == _outcome(portal, call, self.model)

        def teardown(self) -> None:
            if hasattr(self, "model"):
                portal.call(real.clear, self.partition, list("abcdef"))

    return Both


@st.composite
def _puts(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    columns = draw(COLUMNS)
    dtypes = {name: draw(st.sampled_from(["int64", "int64", "int64", "float32"])) for name in columns}
    keys = draw(KEYS)
    return {key: {name: np.array(draw(COLUMN), dtypes[name]) for name in columns} for key in keys}


def _outcome(portal: BlockingPortal, call: Call, plane: DataPlane) -> object:
    try:
        return _plain(portal.call(call, plane))
    except DataPlaneError as error:
        return type(error), sorted(getattr(error, "keys", ()))


def _plain(result: Any) -> object:
    """Arrays as something that == compares, dtype included."""
    if isinstance(result, np.ndarray):
        return cast("Any", result).dtype, result.tolist()
    if isinstance(result, list):
        return [_plain(item) for item in cast("list[Any]", result)]
    if isinstance(result, dict):
        return {key: _plain(value) for key, value in cast("dict[str, Any]", result).items()}
    return result
