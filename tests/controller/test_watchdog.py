"""The stall watchdog: no progress while work remains is a stall, whatever is in flight."""

from __future__ import annotations

import anyio
import pytest

from controller.waiting import Activities
from controller.watchdog import RunStalled, StallWatchdog

pytestmark = pytest.mark.anyio


def watchdog(progress: list[int], action: str, warnings: list[str], activities: Activities) -> StallWatchdog:
    return StallWatchdog(
        stall_after_s=0.2,
        action=action,  # type: ignore[arg-type]
        progress=lambda: (progress[0], 0),
        activities=activities,
        describe=lambda: "buffer: 3 generating",
        warn=warnings.append,
    )


async def test_aborts_with_what_everything_waits_for() -> None:
    activities = Activities()
    with activities.doing("train pump", "waiting for a step's groups"):
        with anyio.fail_after(10), pytest.raises(RunStalled) as e:
            await watchdog([0], "abort", [], activities).run()
    assert "no progress" in str(e.value)
    assert "buffer: 3 generating" in str(e.value)
    assert "train pump: waiting for a step's groups" in str(e.value)
    assert activities.now() == {}


async def test_warns_once_a_period_and_goes_on() -> None:
    warnings: list[str] = []
    with anyio.move_on_after(1.1):
        await watchdog([0], "warn", warnings, Activities()).run()
    assert 1 <= len(warnings) <= 5


async def test_progress_keeps_it_quiet() -> None:
    progress = [0]

    async def advance() -> None:
        while True:
            await anyio.sleep(0.02)
            progress[0] += 1

    with anyio.move_on_after(1.0):
        async with anyio.create_task_group() as tg:
            tg.start_soon(advance)
            await watchdog(progress, "abort", [], Activities()).run()


def test_an_activity_inside_another_shows_the_inner_one() -> None:
    activities = Activities()
    with activities.doing("pump", "outer"):
        with activities.doing("pump", "inner"):
            assert activities.now()["pump"].what == "inner"
        assert activities.now()["pump"].what == "outer"
