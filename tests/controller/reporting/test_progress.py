"""The display shows the run, holds nothing up, and leaves the terminal as it found it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import CancelScope, fail_after
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.reporting import plain_view, progress
from controller.reporting.frame import Line, ProgressSnapshot
from controller.reporting.live_view import LiveView
from controller.reporting.plain_view import PlainView
from controller.reporting.progress import Progress
from controller.reporting.terminal import Terminal
from tests.controller.reporting.reports import frame, snapshot, step_report
from tests.controller.reporting.screens import Screen, piped, terminal

pytestmark = pytest.mark.anyio

MODES = re.compile(r"\x1b\[\?|\x1b[=>c7]|\x1b\[[0-9;]*r")
"""Sequences that change a terminal's state: private modes (cursor, alternate screen, mouse, paste), keypad, reset, scroll
region. None may appear, for a killed process could not take them back."""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def make_progress(screen: Screen, **options: Any) -> Progress:
    arguments: dict[str, Any] = {"name": "a-run", "steps": 40, "snapshot": lambda: None}
    return Progress(terminal=Terminal(screen.fd, "utf-8"), **arguments | options)


def untimed(output: str) -> list[str]:
    lines = output.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    return [line[9:] for line in lines]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")


async def test_without_a_terminal_each_event_is_one_line():
    with piped() as screen:
        async with make_progress(screen, first_step=2).running() as shown:
            shown.phase("starting data plane")
            shown.worker_line("gen-0", "loading \x1b[31mweights\x1b[0m\nloaded")
            shown.phase(None)
            shown.step(step_report(3))
            shown.warning("gen-0 is suspect")
        # The rest of the ETA is the time until it was drawn.
        assert [re.sub(r"eta 2m [0-2][0-9]s$", "eta 2m", line) for line in untimed(screen.read())] == [
            "run a-run: 40 steps, resumed after step 2",
            "starting data plane",
            "[gen-0] loading weights",
            "[gen-0] loaded",
            "step 3/40  reward 0.0300 (std 0.200)  1,840 tok/s  stale 0.50 (max 1)  length 57.5  loss 0.0100  grad 0.400"
            "  entropy 1.10  kl 2.00e-04  truncated 2%  placeholders 1  4.0s (wait 2.0 train 1.5 sync 0.4)  eta 2m",
            "WARNING gen-0 is suspect",
        ]


async def test_a_step_line_is_plain_ascii_also_with_numbers_that_are_not_finite():
    report = step_report(3, trainer={"loss": float("nan")}, reward_mean=None, phases={}, truncated_fraction=None)
    line = plain_view.step_line(report, frame())
    assert line.isascii()
    assert "reward - " in line
    assert "loss nan" in line


async def test_without_a_terminal_silence_is_broken_by_what_is_waited_for(monkeypatch):
    monkeypatch.setattr(plain_view, "QUIET_S", 0.6)
    with piped() as screen:
        async with make_progress(screen, snapshot=lambda: snapshot(3, since=time.monotonic() - 12)).running():
            await anyio.sleep(2.0)
        _, *quiet = untimed(screen.read())
    assert quiet
    for line in quiet:
        assert line == (
            "waiting for rollouts for 12s  step 3/40  rollouts: 112 generating, 9 scoring, 7 finalizing"
            "  groups: 14 generating, 3 ready"
        )


async def test_a_diverged_step_is_a_warning():
    with piped() as screen:
        async with make_progress(screen).running() as shown:
            shown.step(step_report(1, trainer={"loss": float("inf")}))
        assert untimed(screen.read())[-1] == "WARNING step 1: not finite: trainer/loss"


async def test_a_live_display_shows_the_run_with_log_lines_above_it():
    with terminal() as screen:
        async with make_progress(screen, snapshot=lambda: snapshot(3)).running() as shown:
            for step in (1, 2, 3):
                shown.step(step_report(step))
            shown.worker_line("gen-0", "[bold]loaded[/bold] :smile:")
            shown.warning("gen-0 is suspect")
            await anyio.sleep(0.6)
            print("printed by an environment")
        output = ESCAPES.sub("", screen.read())
    last = output[output.rindex("╭") :]
    assert "a-run" in last
    assert "3/40" in last
    assert "▁▅█" in last
    assert "112 generating   9 scoring   7 finalizing" in last
    assert "14 generating   3 ready" in last
    assert "staleness 0.50 (max 1)" in last
    assert "eta" in last
    assert "waiting for rollouts" in last
    assert "gen-0 is suspect" in last
    above = output[: output.rindex("╭")]
    assert "[gen-0] [bold]loaded[/bold] :smile:" in above
    assert "printed by an environment" in above
    assert output.endswith("\n")


async def test_a_live_display_shows_what_is_being_started():
    with terminal() as screen:
        async with make_progress(screen).running() as shown:
            shown.phase("starting generation worker gen-0")
        assert "starting generation worker gen-0" in screen.read()


@pytest.mark.parametrize("value", ["1", ""])
async def test_no_color_is_respected(monkeypatch, value):
    monkeypatch.setenv("NO_COLOR", value)
    with terminal() as screen:
        async with make_progress(screen, snapshot=lambda: snapshot(3)).running() as shown:
            shown.step(step_report(1))
        colors = re.findall(r"\x1b\[(?:\d+;)*(?:3[0-79]|38|9\d)[;m]", screen.read())
    assert bool(colors) == (value == "")


@pytest.mark.parametrize("kind", [piped, terminal])
async def test_the_summary_stands_below_the_closed_display_as_it_is(kind):
    with kind() as screen:
        async with make_progress(screen, snapshot=lambda: snapshot(3)).running() as shown:
            shown.farewell("finished: 40 steps\n  rollouts  dispatched 640")
            shown.note("the last note")
        assert screen.read().replace("\r\n", "\n").endswith("\nfinished: 40 steps\n  rollouts  dispatched 640\n")


async def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with terminal() as screen:
        async with make_progress(screen).running() as shown:
            shown.phase("starting data plane")
        assert untimed(screen.read().replace("\r\n", "\n")) == ["run a-run: 40 steps", "starting data plane"]


@pytest.mark.parametrize("ending", ["finished", "failed", "cancelled"])
async def test_the_terminal_is_left_as_it_was_and_the_last_state_stays(ending):
    with terminal() as screen:
        before = termios.tcgetattr(screen.fd)
        stdout = sys.stdout
        with pytest.raises(RuntimeError, match="boom") if ending == "failed" else nullcontext():
            with CancelScope() as scope:
                async with make_progress(screen, snapshot=lambda: snapshot(3)).running() as shown:
                    try:
                        await anyio.sleep(0.3)
                        if ending == "failed":
                            raise RuntimeError("boom")
                        if ending == "cancelled":
                            scope.cancel()
                            await anyio.sleep_forever()
                    finally:
                        shown.phase(f"the run has {ending}")
        assert termios.tcgetattr(screen.fd) == before
        assert sys.stdout is stdout
        output = screen.read()
    assert not MODES.search(output)
    assert f"the run has {ending}" in output
    assert ESCAPES.sub("", output).rstrip(" ").endswith("╯\r\n")


KILLED = """
import anyio, sys
from controller.reporting.progress import Progress
from tests.controller.reporting.reports import snapshot

frames = 0

def take_snapshot():
    global frames
    frames += 1
    if frames == 3:  # Two have been drawn.
        sys.stderr.write("ready\\n")
    return snapshot(3)

async def main():
    async with Progress(name="a-run", steps=40, snapshot=take_snapshot).running():
        await anyio.sleep_forever()

anyio.run(main)
"""


async def test_also_a_killed_run_leaves_a_usable_terminal():
    with terminal() as screen:
        before = termios.tcgetattr(screen.fd)
        command = [sys.executable, "-c", KILLED]
        with fail_after(60):
            async with await anyio.open_process(command, stdout=screen.fd, stderr=subprocess.PIPE) as process:
                assert process.stderr is not None
                assert await process.stderr.receive() == b"ready\n"
                process.send_signal(signal.SIGKILL)
                await process.wait()
        assert termios.tcgetattr(screen.fd) == before
        output = screen.read()
    assert "waiting for rollouts" in output
    assert not MODES.search(output)


@pytest.mark.parametrize("kind", [piped, terminal])
async def test_a_stopped_terminal_holds_up_neither_the_run_nor_its_end(kind, caplog, monkeypatch):
    monkeypatch.setattr(progress, "MAX_LINES", 500)
    with kind(reading=False) as screen:
        with fail_after(10):
            async with make_progress(screen, close_timeout_s=0.2).running() as shown:
                for _ in range(30):
                    for line in range(200):
                        shown.worker_line("gen-0", f"line {line} " + "x" * 200)
                    await anyio.sleep(0.01)
        assert "did not take the last lines" in caplog.text
        assert "run a-run" in screen.read()


async def test_lines_that_the_terminal_did_not_take_are_counted(monkeypatch):
    monkeypatch.setattr(progress, "MAX_LINES", 10)
    with piped() as screen:
        async with make_progress(screen).running() as shown:
            for line in range(50):
                shown.worker_line("gen-0", f"line {line}")
            shown.step(step_report(1))
        lines = untimed(screen.read())
    assert lines[-1] == "WARNING 41 lines not shown: the display does not keep up"
    assert any(line.startswith("step 1/40") for line in lines)


@pytest.mark.parametrize("kind", [piped, terminal])
async def test_when_the_terminal_goes_the_run_goes_on(kind, caplog):
    with fail_after(10), kind(reading=False) as screen:
        async with make_progress(screen, snapshot=lambda: snapshot(3)).running() as shown:
            await anyio.sleep(0.3)
            os.close(screen._other_end)
            shown.note("into the void")
            await anyio.sleep(0.6)
            shown.note("still running")
        screen._other_end = os.dup(screen.fd)
    assert "the display has gone, the run goes on without it" in caplog.text


async def test_lines_may_come_from_any_thread():
    def shout(name: str) -> None:
        for line in range(100):
            shown.worker_line(name, f"line {line}")
            shown.warning(f"{name} {line}")

    with piped() as screen:
        async with make_progress(screen).running() as shown:
            threads = [threading.Thread(target=shout, args=(f"gen-{i}",)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await anyio.to_thread.run_sync(thread.join)
        lines = untimed(screen.read())
    assert len(lines) == 1 + 4 * 200
    for i in range(4):
        own = [line for line in lines if line.startswith(f"[gen-{i}]")]
        assert own == [f"[gen-{i}] line {n}" for n in range(100)]


async def test_an_error_of_the_snapshot_is_the_run_s_error():
    def broken() -> ProgressSnapshot:
        raise KeyError("no such group")

    with piped() as screen, fail_after(10), pytest.raises(KeyError, match="no such group"):
        async with make_progress(screen, snapshot=broken).running():
            await anyio.sleep_forever()


names = st.text(max_size=30)
numbers = st.none() | st.floats()
counts = st.dictionaries(names, st.integers(0, 10**9), max_size=6)
reports = st.builds(
    lambda step, numbers, named: step_report(
        step,
        reward_mean=numbers[0],
        reward_std=numbers[1],
        staleness_mean=numbers[2],
        tokens_per_s=numbers[3],
        truncated_fraction=numbers[4],
        phases=named,
        trainer={**named, "loss": numbers[5]},
    ),
    st.integers(0, 10**6),
    st.tuples(*[numbers] * 6),
    st.dictionaries(names, numbers, max_size=5),
)
lines = st.builds(
    Line, time=st.floats(0, 4e9), kind=st.sampled_from(["note", "warning", "worker"]), source=names, text=names
)
finite = st.floats(allow_nan=False, allow_infinity=False)
frames = st.builds(
    frame,
    name=names,
    step=st.integers(0, 100),
    steps=st.integers(0, 100),
    elapsed_s=st.floats(0, 1e9),
    activity=names,
    eta_s=st.none() | st.floats(-1e9, 1e9),
    snapshot=st.none() | st.builds(snapshot, st.integers(0, 100), names),
    latest=st.none() | reports,
    rewards=st.lists(finite, max_size=64).map(tuple),
    warnings=st.lists(lines, max_size=3).map(tuple),
)


@given(
    name=names, frame=frames, above=st.lists(lines | reports, max_size=4), encoding=st.sampled_from(["utf-8", "ascii"])
)
@settings(max_examples=60, deadline=None)
def test_whatever_there_is_to_show_can_be_drawn(name, frame, above, encoding):
    with Path(os.devnull).open("wb") as file:
        live = LiveView(Terminal(file.fileno(), encoding))
        live.draw(frame, above)
        live.close(frame, name)
        plain = PlainView(Terminal(file.fileno(), encoding))
        plain.draw(frame, above)
        plain.close(frame, name)
