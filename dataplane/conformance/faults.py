"""What every DataPlane must do while one of its servers stands still: run each of FAULTS for each server.

`freeze` is a context manager that stops one server (SIGSTOP) and lets it go on when it is left (SIGCONT). The rows are
enough to be on every one of a few storage servers, but a call need not meet the frozen one: then it must simply succeed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager

import anyio

from dataplane.conformance.cases import row, values
from dataplane.errors import DataPlaneTimeout
from dataplane.plane import DataPlane

Freeze = Callable[[], AbstractContextManager[None]]
Fault = Callable[[DataPlane, str, Freeze], Awaitable[None]]

FAULTS: list[Fault] = []

DEADLINE_S = 0.3
HANG_S = 60.0
KEYS = [f"k{n}" for n in range(8)]
ROWS = {key: row(n) for n, key in enumerate(KEYS)}


def fault(function: Fault) -> Fault:
    FAULTS.append(function)
    return function


@fault
async def every_call_ends_within_its_deadline_and_what_it_did_is_known(
    plane: DataPlane, partition: str, freeze: Freeze
) -> None:
    await plane.put(partition, {f"old {key}": one for key, one in ROWS.items()})
    await plane.put(partition, ROWS)
    outcomes: dict[str, str] = {}

    async def call(name: str, made: Awaitable[object]) -> None:
        try:
            with anyio.fail_after(HANG_S):
                await made
            outcomes[name] = "done"
        except DataPlaneTimeout as error:
            outcomes[name] = error.outcome

    async with _a_loop_that_runs():
        with freeze():
            await call("get", plane.get(partition, KEYS, ["ids"], timeout=DEADLINE_S))
            await call("put", plane.put(partition, {f"new {k}": row(1) for k in KEYS}, timeout=DEADLINE_S))
            await call("clear", plane.clear(partition, [f"old {key}" for key in KEYS], timeout=DEADLINE_S))

    assert outcomes["get"] in ("done", "none")
    # Later calls on the same keys wait for what is still under way: the put is taken back, the clear takes effect.
    with anyio.fail_after(HANG_S):
        assert await values(plane, partition, KEYS) == list(range(len(KEYS)))
        if outcomes["put"] != "done":
            await plane.put(partition, {f"new {key}": row(2) for key in KEYS})
        assert await plane.keys(partition) == sorted([*KEYS, *(f"new {key}" for key in KEYS)])
        expected = 1 if outcomes["put"] == "done" else 2
        assert await values(plane, partition, [f"new {key}" for key in KEYS]) == [expected] * len(KEYS)
        assert await plane.clear(partition, await plane.keys(partition)) == 2 * len(KEYS)
        assert await plane.keys(partition) == []


@fault
async def a_cancelled_write_ends_before_its_cancellation_is_delivered(
    plane: DataPlane, partition: str, freeze: Freeze
) -> None:
    async with anyio.create_task_group() as tasks:
        with freeze():
            tasks.start_soon(plane.put, partition, ROWS)
            await anyio.sleep(0.2)
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.2)
    with anyio.fail_after(HANG_S):
        left = await plane.keys(partition)
        assert left in ([], sorted(KEYS))
        assert await values(plane, partition, left) == [KEYS.index(key) for key in left]
        assert await plane.clear(partition, KEYS) == len(left)


@fault
async def a_cancelled_get_leaves_at_once(plane: DataPlane, partition: str, freeze: Freeze) -> None:
    await plane.put(partition, ROWS)
    with freeze(), anyio.fail_after(HANG_S), anyio.move_on_after(0.1):
        await plane.get(partition, KEYS, ["ids"])
    with anyio.fail_after(HANG_S):
        assert await values(plane, partition, KEYS) == list(range(len(KEYS)))
        assert await plane.clear(partition, KEYS) == len(KEYS)


@asynccontextmanager
async def running_loop() -> AsyncGenerator[list[float]]:
    """The gaps, in seconds, that a task saw which does nothing but wait 5 ms again and again."""
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            before = anyio.current_time()
            await anyio.sleep(0.005)
            gaps.append(anyio.current_time() - before)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        yield gaps
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def _a_loop_that_runs() -> AsyncGenerator[None]:
    """Fails when the caller's loop stood still with the server: for longer than a busy machine may hold up any process."""
    async with running_loop() as gaps:
        yield
    still = sum(gap for gap in gaps if gap > DEADLINE_S / 2)
    assert still < 2 * DEADLINE_S, f"the loop stood still for {still:.2f} s"
