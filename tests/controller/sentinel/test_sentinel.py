"""The sentinel names what blocks the loop, by file and line, and is not misled by a process that was stopped."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from controller.sentinel.sentinel import LoopBlocked, Sentinel
from controller.sentinel.stalls import Stall

pytestmark = pytest.mark.anyio

HANG_GUARD_S = 60


def sleeps() -> None:
    time.sleep(0.3)


def matches() -> None:
    re.match(r"(a+)+$", "a" * 24 + "b")


def place(function: Callable[[], None]) -> str:
    return f"{__file__}:{inspect.getsourcelines(function)[1] + 1} in {function.__name__}"


class Reports:
    def __init__(self) -> None:
        self.stalls: list[tuple[Stall, float]] = []

    def __call__(self, stall: Stall) -> None:
        self.stalls.append((stall, time.monotonic()))

    async def of(self, culprit: str) -> tuple[Stall, float]:
        with anyio.fail_after(HANG_GUARD_S):
            while True:
                for stall, at in self.stalls:
                    if stall.culprit.startswith(culprit):
                        return stall, at
                await anyio.sleep(0.01)


async def test_a_sleep_in_a_callback_is_reported_with_its_place() -> None:
    reports = Reports()
    with Sentinel(on_stall=reports) as sentinel:
        began = time.monotonic()
        asyncio.get_running_loop().call_soon(sleeps)
        stall, at = await reports.of(place(sleeps))
        assert at - began < 0.5 + sentinel.stood_still_s
    assert stall.seconds == pytest.approx(0.3, abs=0.15)
    assert f"{stall}".startswith("the event loop was blocked for 0.")
    assert sentinel.stalls[stall.culprit] == 1
    assert sentinel.longest is not None
    assert sentinel.lag.max_ms >= 250


async def test_a_stall_that_goes_on_is_told_on_stderr_since_the_display_stands_still(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("controller.sentinel.sentinel._STILL_BLOCKED_S", (0.1, 0.3, 0.6, 0.9))
    with Sentinel(on_stall=Reports()):
        await anyio.sleep(0.02)
        time.sleep(1.5)  # noqa: ASYNC251  # what is tried
        told = capfd.readouterr().err
    assert re.search(rf"the event loop was blocked for \d\.\d\d s at {re.escape(__file__)}:\d+ .*, and still is", told)


async def test_native_code_that_keeps_the_interpreter_is_named_by_its_caller() -> None:
    reports = Reports()
    with Sentinel(on_stall=reports):
        await anyio.sleep(0.02)
        matches()
        stall, _ = await reports.of(place(matches))
    assert "re/__init__.py" in stall.culprit


async def test_a_long_collection_is_named_as_what_it_is() -> None:
    reports = Reports()
    looked_at = [[i] for i in range(1_000_000)]
    with Sentinel(report_over_ms=20, on_stall=reports):
        await anyio.sleep(0.02)
        gc.collect()
        await reports.of("garbage collection")
    assert looked_at


async def test_a_block_that_stays_under_the_bound_is_quiet() -> None:
    reports = Reports()
    with Sentinel(report_over_ms=1000, on_stall=reports) as sentinel:
        sleeps()
        await anyio.sleep(0.05)
        figures = sentinel.take_figures()
        assert figures["lag_max_ms"] >= 250
        assert figures["stalls"] == 0
        assert sentinel.take_figures()["lag_max_ms"] < figures["lag_max_ms"]
    assert reports.stalls == []


async def blocked(*, then: float | None, watch: bool = False) -> None:
    """What a test does that must fail: `then` seconds after the blocking call the block is left."""
    with Sentinel(fail_over_ms=100) as sentinel:
        if watch:
            asyncio.get_running_loop().call_soon(sleeps)
            with anyio.fail_after(HANG_GUARD_S):
                await sentinel.watch()
        sleeps()
        if then is not None:
            await anyio.sleep(then)


async def test_stalls_at_which_nothing_waits_for_the_loop_are_not_judged() -> None:
    reports = Reports()
    with Sentinel(fail_over_ms=100, on_stall=reports) as sentinel:
        sentinel.pause()
        sleeps()
        await anyio.sleep(0.05)
        sleeps()
        sentinel.judge()
        await anyio.sleep(0.05)
        assert (reports.stalls, sentinel.stalls.total(), sentinel.lag.count > 0) == ([], 0, True)


async def test_fail_over_fails_what_stands_in_the_block_and_names_it() -> None:
    with pytest.raises(LoopBlocked, match=re.escape(place(sleeps))):
        await blocked(then=0.05)
    with pytest.raises(LoopBlocked, match=re.escape(place(sleeps))):
        await blocked(then=None)  # No other beat comes before the block ends.


async def test_fail_over_wakes_who_watches() -> None:
    with pytest.raises(LoopBlocked) as caught:
        await blocked(then=None, watch=True)
    assert str(caught.value).count(place(sleeps)) >= 2, "the culprit, and the stack"


async def test_an_error_of_the_block_is_not_hidden() -> None:
    async def fails() -> None:
        with Sentinel(fail_over_ms=100):
            sleeps()
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await fails()


def script(body: str) -> subprocess.Popen[str]:
    code = "import time, sys, re, anyio\nfrom pathlib import Path\nfrom controller.sentinel.sentinel import Sentinel\n"
    return subprocess.Popen(
        [sys.executable, "-c", code + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )


def test_a_process_that_was_stopped_has_no_stall() -> None:
    process = script("""
        async def main():
            with Sentinel(exit_after_s=0.5) as sentinel:
                print("ready", flush=True)
                await anyio.to_thread.run_sync(sys.stdin.readline)
                await anyio.sleep(0.1)
                print(sum(sentinel.stalls.values()), sentinel.stood_still_s > 1, sentinel.lag.max_ms > 1000)
        anyio.run(main)
    """)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate("go\n", timeout=HANG_GUARD_S)
    assert (process.returncode, out) == (0, "0 True True\n"), err
    assert "stood still" in err


def test_a_loop_that_stays_blocked_ends_the_process_with_all_stacks(tmp_path: Path) -> None:
    process = script(f"""
        async def waits():
            await anyio.sleep(1000)
        async def main():
            async with anyio.create_task_group() as tg:
                tg.start_soon(waits, name="the waiting one")
                file = Path({str(tmp_path / "stacks.txt")!r})
                with Sentinel(exit_after_s=0.5, last_words=lambda: "who waits for what", stacks_file=file):
                    await anyio.sleep(0.05)
                    time.sleep(1000)
        anyio.run(main)
    """)
    _, err = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 4, err
    assert re.search(r"blocked for 0\.\d+ s at <string>:\d+ in main; it was given up", err)
    stacks = (tmp_path / "stacks.txt").read_text()
    for wanted in (
        "who waits for what",
        "task the waiting one",
        "in waits",
        "thread MainThread",
        "thread loop sentinel",
    ):
        assert wanted in stacks, stacks


def test_native_code_that_never_gives_the_interpreter_back_is_ended_by_the_kernel() -> None:
    process = script("""
        async def main():
            with Sentinel(exit_after_s=0.5):
                await anyio.sleep(0.1)
                re.match(r"(a+)+$", "a" * 60 + "b")
        anyio.run(main)
    """)
    _, err = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == -signal.SIGPROF
    assert re.search(r'File "<string>", line \d+ in main', err)
