"""trace.json: what ran when, as Chrome trace events (opens in Perfetto and chrome://tracing, also when cut short).

The file is the JSON array format of the "Trace Event Format": one event per line, of which the closing bracket may be
missing. Overlapping spans of one track get rows of their own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from controller.reporting.files import AppendFile
from controller.reporting.writer import Channel, ReportWriter

logger = logging.getLogger(__name__)

TRACE_FILE = "trace.json"
TRACKS = ("train", "weight_sync", "finalize", "rollouts")
"""The order of the known tracks on the screen; others follow."""
_LANES_PER_TRACK = 10_000
_HEAD = b"[\n"
_SEPARATOR = b",\n"
_TAIL = b"\n]\n"


class TraceLog:
    """Make one with `TraceLog.open`. It is closed with the writer."""

    def __init__(self, channel: Channel[bytes], *, max_events: int = 200_000) -> None:
        self._channel = channel
        self._left = max_events
        self._max_events = max_events
        self._encoder = msgspec.json.Encoder()
        self._unix_minus_monotonic = time.time() - time.monotonic()
        self._lane_ends: dict[str, list[int]] = {}
        self._put({"ph": "M", "name": "process_name", "args": {"name": "controller"}})

    @classmethod
    async def open(
        cls, writer: ReportWriter, run_dir: Path, *, resume: bool = False, max_events: int = 200_000
    ) -> TraceLog:
        """`resume` continues the file, otherwise it is replaced. `max_events` bounds what this process adds (about 150
        bytes each); when it is reached, trace and log say so, once, and later events are discarded. Raises
        `WriteFailed`."""
        channel = await writer.open(_TraceSink(run_dir / TRACE_FILE, resume=resume))
        return cls(channel, max_events=max_events)

    def complete(
        self,
        name: str,
        category: str,
        start_s: float,
        end_s: float,
        track: str,
        args: Mapping[str, object] | None = None,
    ) -> None:
        """A span on `time.monotonic()`'s clock, told when it has ended. Never waits. `args` must be JSON-able.

        The span takes the row of its track that came free last before `start_s`; for spans told in the order of their
        ends this opens no more rows than ran at the same time (best fit; Faigle and Nawijn 1995).
        """
        if self._left == 0:
            return
        start = self._microseconds(start_s)
        end = max(start, self._microseconds(end_s))
        event: dict[str, object] = {"ph": "X", "name": name, "cat": category, "ts": start, "dur": end - start}
        event["tid"] = self._row(track, start, end)
        if args:
            event["args"] = args
        self._put(event)
        self._left -= 1
        if self._left == 0:
            text = f"trace is full: {self._max_events} events"
            self._put({"ph": "i", "s": "g", "name": text, "ts": end, "tid": event["tid"]})
            logger.warning("%s in %s; later ones are not recorded", text, self._channel.sink.path)

    def _row(self, track: str, start: int, end: int) -> int:
        ends = self._lane_ends.setdefault(track, [])
        free = [lane for lane, busy_until in enumerate(ends) if busy_until <= start]
        if free:
            lane = max(free, key=ends.__getitem__)
            ends[lane] = end
        else:
            lane = len(ends)
            ends.append(end)
        row = self._first_row(track) + lane
        if not free:
            label = track if lane == 0 else f"{track} {lane + 1}"
            self._put({"ph": "M", "name": "thread_name", "tid": row, "args": {"name": label}})
            self._put({"ph": "M", "name": "thread_sort_index", "tid": row, "args": {"sort_index": row}})
        return row

    def _first_row(self, track: str) -> int:
        others = [name for name in self._lane_ends if name not in TRACKS]
        index = TRACKS.index(track) if track in TRACKS else len(TRACKS) + others.index(track)
        return 1 + index * _LANES_PER_TRACK

    def _microseconds(self, monotonic_s: float) -> int:
        return round((monotonic_s + self._unix_minus_monotonic) * 1e6)

    def _put(self, event: dict[str, object]) -> None:
        self._channel.put(self._encoder.encode({"pid": 1, **event}))


class _TraceSink:
    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self._file = AppendFile(path)
        self._resume = resume
        self._empty = True
        self._opened = False

    def open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._empty = not (self._resume and _reopen(self.path))
        if self._empty:
            self.path.write_bytes(b"")
        self._file.open()
        if self._empty:
            self._file.write(_HEAD)
        self._opened = True

    def write(self, records: Sequence[bytes], /) -> None:
        data = _SEPARATOR.join(records)
        self._file.write(data if self._empty else _SEPARATOR + data)
        self._empty = False

    def close(self) -> None:
        if self._opened:
            self._opened = False
            try:
                self._file.write(_TAIL)
            finally:
                self._file.close()


def _reopen(path: Path, search: int = 1 << 20) -> bool:
    """Cuts the file after its last whole event; False when there is none."""
    if not path.exists():
        return False
    with path.open("rb+") as file:
        start = max(0, file.seek(0, os.SEEK_END) - search)
        file.seek(start)
        tail = file.read()
        cut = len(tail) - len(_TAIL) if tail.endswith(_TAIL) else tail.rfind(_SEPARATOR)
        if cut < 0 or start + cut <= len(_HEAD):
            return False
        file.truncate(start + cut)
        return True


class _Event(Struct):
    ph: str
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0


def overlap(trace_path: Path, category_a: str, category_b: str) -> float:
    """Seconds during which a span of each category was open. Blocks; reads files cut short by a crash."""
    spans: dict[str, list[tuple[float, float]]] = {category_a: [], category_b: []}
    decoder = msgspec.json.Decoder(_Event)
    with trace_path.open("rb") as file:
        for line in file:
            body = line.strip().removesuffix(b",")
            if body in (b"", b"[", b"]"):
                continue
            try:
                event = decoder.decode(body)
            except msgspec.DecodeError:
                if line.endswith(b"\n"):
                    raise
                break
            if event.ph == "X" and event.cat in spans:
                spans[event.cat].append((event.ts, event.ts + event.dur))
    return _common(_union(spans[category_a]), _union(spans[category_b])) / 1e6


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _common(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Length of the intersection of two sorted lists of disjoint spans."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total
