"""The stall watchdog: no progress while work remains is a stall, whatever is in flight; so is what stays unwell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import anyio
import pytest

from controller.waiting import Activities
from controller.waits.graph import Culprit, Part, WaitGraph
from controller.watchdog import Check, RunStalled, StallWatchdog

pytestmark = pytest.mark.anyio

GRAPH = WaitGraph(
    run="r",
    pid=1,
    time=0.0,
    doing="training",
    parts=(Part(name="train pump", what="waiting for a step's groups", seconds=3.0, on="replay buffer"),),
    culprit=Culprit(part="data plane", why="get of 4 rows from staging has had no answer for 3.0 s"),
)


def watchdog(
    progress: list[int],
    action: Literal["warn", "abort"],
    warnings: list[str],
    checks: Mapping[str, Check] | None = None,
) -> StallWatchdog:
    return StallWatchdog(
        stall_after_s=0.2,
        action=action,
        progress=lambda: (progress[0], 0),
        graph=lambda: GRAPH,
        checks=lambda seconds: checks or {},
        warn=warnings.append,
    )


async def advancing(watched: StallWatchdog, progress: list[int], seconds: float) -> None:
    """Watch a run that makes progress."""

    async def advance() -> None:
        while True:
            await anyio.sleep(0.02)
            progress[0] += 1

    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as tg:
            tg.start_soon(advance)
            await watched.run()


async def test_aborts_with_the_culprit_and_with_what_everything_waits_for() -> None:
    with anyio.fail_after(10), pytest.raises(RunStalled) as e:
        await watchdog([0], "abort", []).run()
    headline, _, rest = str(e.value).partition("\n")
    assert headline.startswith("no progress for 0 s, likely because of the data plane: get of 4 rows")
    assert "train pump: waiting for a step's groups, for 3.0 s (waits for: replay buffer)" in rest


async def test_warns_once_a_period_and_goes_on() -> None:
    warnings: list[str] = []
    with anyio.move_on_after(1.1):
        await watchdog([0], "warn", warnings).run()
    assert 1 <= len(warnings) <= 5


async def test_progress_keeps_it_quiet() -> None:
    progress = [0]
    await advancing(watchdog(progress, "abort", []), progress, 1.0)


@pytest.mark.parametrize("how", ["raises", "hangs"])
async def test_what_stays_unwell_is_a_stall_although_the_run_moves(how: str) -> None:
    async def check() -> None:
        if how == "raises":
            raise ConnectionError("gone")
        await anyio.sleep_forever()

    progress = [0]
    with anyio.fail_after(20), pytest.raises(ExceptionGroup) as e:
        await advancing(watchdog(progress, "abort", [], {"sandbox": check}), progress, 15)
    (stall,) = e.value.exceptions
    assert isinstance(stall, RunStalled)
    wanted = "ConnectionError: gone" if how == "raises" else "no answer within 0.05 s"
    assert str(stall).startswith("not healthy for 0 s: sandbox: " + wanted)


async def test_what_becomes_unwell_is_told_at_once_and_so_is_its_recovery(caplog: pytest.LogCaptureFixture) -> None:
    sick = True

    async def check() -> None:
        if sick:
            raise ConnectionError("gone")

    watched = watchdog([0], "warn", [], {"sandbox": check})
    with anyio.move_on_after(20):
        async with anyio.create_task_group() as tg:
            tg.start_soon(watched.run)
            while not watched.unhealthy:
                await anyio.sleep(0.01)
            sick = False
            while watched.unhealthy:
                await anyio.sleep(0.01)
            tg.cancel_scope.cancel()
    told = [record.getMessage() for record in caplog.records]
    assert told == ["sandbox: not healthy: ConnectionError: gone", "sandbox: healthy again"]


async def test_what_is_unwell_for_a_moment_is_no_stall() -> None:
    looks = 0

    async def check() -> None:
        nonlocal looks
        looks += 1
        if looks % 2:
            raise ConnectionError("gone")

    progress = [0]
    await advancing(watchdog(progress, "abort", [], {"sandbox": check}), progress, 1.0)
    assert looks > 2


def test_an_activity_inside_another_shows_the_inner_one() -> None:
    activities = Activities()
    with activities.doing("pump", "outer"):
        with activities.doing("pump", "inner", on="data plane"):
            assert (activities.now()["pump"].what, activities.now()["pump"].on) == ("inner", "data plane")
            (oldest,) = activities.oldest(5)
            assert [oldest[0], oldest[1].what, oldest[2].what] == ["pump", "outer", "inner"]
        assert activities.now()["pump"].what == "outer"
    assert activities.now() == {}


def test_activities_beside_each_other_end_in_any_order() -> None:
    activities = Activities()
    first: Any = activities.doing("rollout", "first call")
    second: Any = activities.doing("rollout", "second call")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert activities.now()["rollout"].what == "second call"
    second.__exit__(None, None, None)
    assert activities.now() == {}
    assert len(activities) == 0
