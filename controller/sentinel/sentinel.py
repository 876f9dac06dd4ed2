"""The sentinel itself: the loop beats, a thread outside of it listens, and what silences the loop is named with its stack.

It needs nothing of the loop, and tells a loop that is blocked from a process that was stopped or starved.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import anyio

from controller.exits import Exit
from controller.leaving import leave
from controller.sentinel.alarm import clear_alarm, set_alarm
from controller.sentinel.clocks import Clocks, OtherThreads, blocked_s
from controller.sentinel.lag import LagHistogram
from controller.sentinel.stacks import culprit_of, describe, dump, thread_stack, thread_stacks, waits_for_events
from controller.sentinel.stalls import UNKNOWN, Samples, Stall

logger = logging.getLogger(__name__)

_STILL_BLOCKED_S = (1.0, 10.0, 60.0, 600.0)
"""A stall that goes on is reported when it has lasted so long, and once more when it ends."""
_STOOD_STILL_S = 1.0
_REARM_S = 0.5
_REBASE_S = 1.0


class LoopBlocked(Exception):
    """Something kept the event loop for longer than `loop.fail_over_ms`. The message names it."""

    def __init__(self, stall: Stall, limit_ms: float) -> None:
        super().__init__(f"{stall} (the limit is {limit_ms:g} ms)\n{describe(stall.stack)}")
        self.stall = stall


class Sentinel:
    """`with Sentinel(...) as sentinel:` in a running loop's thread watches that loop while inside.

    `report_over_ms`: longer stalls are counted by culprit and given to `on_stall`, which is called in the sentinel's thread.
    `fail_over_ms`: a longer one makes `watch` raise LoopBlocked, and the `with` block too when it is left without an error.
    `exit_after_s`: a stall of that length ends the process with `Exit.BLOCKED`, after all stacks and `last_words()` were
    written to `stacks_file` (None: stderr). `beat_ms`: how often the lag is measured.
    """

    def __init__(
        self,
        *,
        report_over_ms: float = 100.0,
        fail_over_ms: float | None = None,
        exit_after_s: float | None = None,
        beat_ms: float = 5.0,
        on_stall: Callable[[Stall], None] | None = None,
        last_words: Callable[[], str] = str,
        stacks_file: Path | None = None,
    ) -> None:
        self._report_s = report_over_ms / 1000
        self._fail_s = None if fail_over_ms is None else fail_over_ms / 1000
        self._threshold_s = min(self._report_s, self._fail_s or self._report_s)
        self._exit_after_s = exit_after_s
        self._beat_s = beat_ms / 1000
        self._tick_s = min(max(self._threshold_s / 4, 0.002), 0.025)
        self._on_stall = on_stall or _log
        self._last_words = last_words
        self._stacks_file = stacks_file
        self._lag = LagHistogram()
        self.lag = LagHistogram()
        """Since the beginning."""
        self.stalls: Counter[str] = Counter()
        """Stalls over `report_over_ms`, by culprit."""
        self.longest: Stall | None = None
        self.stood_still_s = 0.0
        """For so long the process was stopped or had no CPU."""
        self._lenient_until: float = 0
        """The number of the beat up to which stalls are neither counted nor judged."""
        self._failure: Stall | None = None
        self._failed = anyio.Event()
        self._beats = 0
        self._beat_at = 0.0
        self._due = 0.0
        self._gc_began = 0.0
        self._gc_s = 0.0
        self._gc_generation = 0
        self._late: deque[tuple[int, float, float, int]] = deque(maxlen=1000)
        """Beats that were late: number, lag, seconds of it in the collector, and of which generation."""
        self._timer: asyncio.TimerHandle | None = None
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.current_thread()
        self._clocks = Clocks(self._loop_thread)
        self._others = OtherThreads()
        self._thread = threading.Thread(target=self._listen, name="loop sentinel", daemon=True)
        self._beat_at = time.monotonic()
        self._due = self._beat_at + self._beat_s
        self._timer = self._loop.call_later(self._beat_s, self._beat)
        gc.callbacks.append(self._collecting)
        self._has_alarm = self._exit_after_s is not None and set_alarm()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._timer is not None:
            self._timer.cancel()
        gc.callbacks.remove(self._collecting)
        self._thread.join()  # One tick at most.
        self._clocks.close()
        if self._has_alarm:
            clear_alarm()
        if error is None:
            self._raise_failure()

    async def watch(self) -> NoReturn:
        """Wait for a stall over `fail_over_ms` and raise LoopBlocked."""
        await self._failed.wait()
        self._raise_failure()
        raise AssertionError("the event is set after the failure")

    def pause(self) -> None:
        """From here on stalls are only logged, until `judge`: nothing waits for the loop yet, or any more."""
        self._lenient_until = math.inf

    def judge(self) -> None:
        """Count and judge what comes from here on, and measure the lag anew."""
        self._lenient_until = self._beats + 1
        self.lag, self._lag = LagHistogram(), LagHistogram()

    def take_figures(self) -> dict[str, float]:
        """`LagHistogram.figures` since the last call, and `stalls` since the beginning."""
        taken, self._lag = self._lag, LagHistogram()
        return {**taken.figures(), "stalls": float(self.stalls.total())}

    @property
    def silent_s(self) -> float:
        """How long the loop has not run what was due, as of now; from any thread."""
        return max(0.0, time.monotonic() - self._due)

    def where(self) -> str:
        """What the loop's thread is at, as of now; from another thread."""
        return culprit_of(thread_stack(self._loop_thread.ident or 0))

    def dump(self) -> str:
        """The stacks of all tasks and threads."""
        return dump(self._loop)

    def describe(self) -> Mapping[str, Any]:
        return {**self.lag.figures(), "stalls": dict(self.stalls), "stood_still_s": self.stood_still_s}

    def _raise_failure(self) -> None:
        if self._failure is not None:
            assert self._fail_s is not None
            raise LoopBlocked(self._failure, self._fail_s * 1000)

    # In the loop's thread.

    def _beat(self) -> None:
        now = time.monotonic()
        lag = max(0.0, now - self._due)
        self._beats += 1
        self._lag.add(lag * 1000)
        self.lag.add(lag * 1000)
        if lag >= self._threshold_s:
            self._late.append((self._beats, lag, self._gc_s, self._gc_generation))
        self._gc_s = 0.0
        self._beat_at = now
        self._due = now + self._beat_s
        self._timer = self._loop.call_later(self._beat_s, self._beat)

    def _collecting(self, phase: str, info: Mapping[str, Any]) -> None:
        if threading.get_ident() != self._loop_thread.ident:
            return
        if phase == "start":
            self._gc_began = time.monotonic()
        else:
            self._gc_s += time.monotonic() - self._gc_began
            self._gc_generation = info["generation"]

    # In the sentinel's thread.

    def _listen(self) -> None:
        beats, excused, samples = self._beats, 0.0, Samples()
        own = {self._loop_thread.ident, threading.get_ident()}
        rearm_at = rebase_at = 0.0
        while not self._stop.wait(self._tick_s):
            # First of all: the interpreter passes to another thread with the first system call.
            at, silent = self._beats, self.silent_s
            stacks = thread_stacks() if silent >= self._threshold_s / 2 else {}
            turn = self._clocks.turn(self._tick_s)
            now = time.monotonic()
            if self._has_alarm and now >= rearm_at:
                assert self._exit_after_s is not None
                signal.setitimer(signal.ITIMER_PROF, self._exit_after_s)
                rearm_at = now + min(_REARM_S, self._exit_after_s / 4)
            charge = blocked_s(turn)
            excused += turn.elapsed - charge
            if turn.elapsed - charge > _STOOD_STILL_S:
                logger.warning(
                    "the whole process stood still for %.1f s: stopped, or without CPU", turn.elapsed - charge
                )
            self.stood_still_s += turn.elapsed - charge
            other = None
            if turn.late and turn.others_cpu > turn.loop_cpu:
                other = self._others.busiest(besides=own)
            if at != beats:
                unseen = UNKNOWN if other is None else f"thread {other.name}, which kept the interpreter"
                self._ended(at, excused, samples, unseen)
                # What is not the loop's may have come after its last beat, and is then to be told from the next silence.
                beats, excused, samples = at, min(turn.elapsed - charge, silent), Samples()
            if stacks:
                loop_stack = stacks.get(self._loop_thread.ident or 0, ())
                if other is not None and other.ident in stacks:
                    samples.add(stacks[other.ident])
                elif waits_for_events(loop_stack) and turn.loop_cpu < turn.elapsed / 5:
                    excused += charge  # Nothing to blame: the loop waits, and was not woken.
                    continue
                else:
                    samples.add(loop_stack)
                self._still_blocked(silent - excused, samples)
            elif now >= rebase_at:
                self._others.rebase()
                rebase_at = now + _REBASE_S
        self._left(excused, samples)

    def _still_blocked(self, seconds: float, samples: Samples) -> None:
        stall = Stall(samples.culprit, seconds, samples.stack)
        due = next((bound for bound in _STILL_BLOCKED_S if bound > samples.told_s), math.inf)
        if seconds >= due and self._beats >= self._lenient_until:
            samples.told_s = seconds
            self._on_stall(stall)
            if due > _STILL_BLOCKED_S[0]:
                # The loop draws the display. In a thread: a stopped terminal is not to stop the sentinel.
                threading.Thread(target=_say_on_stderr, args=(stall,), daemon=True).start()
        if self._exit_after_s is not None and seconds >= self._exit_after_s:
            self._end_process(stall)

    def _ended(self, at: int, excused: float, samples: Samples, unseen: str = UNKNOWN) -> None:
        """Judge the late beats up to number `at`. `excused` seconds of the longest silence were not the loop's doing, and
        `samples` are of it; `unseen` is the culprit when there are none."""
        late: list[tuple[int, float, float, int]] = []
        while self._late and self._late[0][0] <= at:
            late.append(self._late.popleft())
        longest = max(late, key=lambda beat: beat[1], default=None)
        for beat in late:
            number, lag, gc_s, generation = beat
            own = samples if beat is longest else Samples()
            seconds = lag - excused if beat is longest else lag
            if seconds < self._threshold_s:
                continue
            culprit = own.culprit if own.stack else unseen
            if gc_s > seconds / 2:
                culprit = f"garbage collection of generation {generation}"
            stall = Stall(culprit, seconds, own.stack)
            if number <= self._lenient_until:
                logger.info("%s, while nothing waited for it", stall)
            else:
                self._record(stall, told_s=own.told_s)

    def _left(self, excused: float, samples: Samples) -> None:
        """The `with` block was left; what blocked the loop may have left it in the same go, before another beat."""
        self._ended(self._beats, excused, samples)
        if self.silent_s - excused >= self._threshold_s and self._beats >= self._lenient_until:
            self._record(Stall(samples.culprit, self.silent_s - excused, samples.stack))

    def _record(self, stall: Stall, *, told_s: float = 0.0) -> None:
        """`told_s`: how long it had lasted when it was reported while it went on."""
        if self.longest is None or stall.seconds > self.longest.seconds:
            self.longest = stall
        if stall.seconds >= self._report_s:
            self.stalls[stall.culprit] += 1
            if stall.seconds > 1.5 * told_s:
                self._on_stall(stall)
        if self._fail_s is not None and stall.seconds >= self._fail_s and self._failure is None:
            self._failure = stall
            with suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(self._failed.set)

    def _end_process(self, stall: Stall) -> NoReturn:
        try:
            words = self._last_words()
        except Exception as error:  # The loop's thread may be in the middle of changing what this reads.
            words = f"what waits for what could not be read: {error!r}"
        text = f"{stall}; it was given up\n{describe(stall.stack)}\n\n{words}\n\n{self.dump()}\n"
        threading.Thread(target=self._write_stacks, args=(text,), daemon=True).start()
        if self._stacks_file is None:
            leave(Exit.BLOCKED, text)
        time.sleep(0.5)  # For the file; a disk that hangs does not keep the process alive.
        leave(Exit.BLOCKED, f"{stall}; it was given up\n{describe(stall.stack)}\nall stacks: {self._stacks_file}")

    def _write_stacks(self, text: str) -> None:
        if self._stacks_file is not None:
            self._stacks_file.write_text(text, encoding="utf-8", errors="backslashreplace")


def _say_on_stderr(stall: Stall) -> None:
    text = f"\n{stall}, and still is; the display stands still meanwhile\n"
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def _log(stall: Stall) -> None:
    logger.warning("%s\n%s", stall, describe(stall.stack))
