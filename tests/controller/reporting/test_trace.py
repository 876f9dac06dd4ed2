"""The trace is valid JSON when closed, readable when cut short, and its rows never hold two spans at once."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.reporting.trace import TraceLog, overlap
from controller.reporting.writer import ReportWriter

pytestmark = pytest.mark.anyio

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)).map(lambda s: (s[0], s[0] + s[1])), max_size=30)


async def write_trace(run_dir: Path, spans_by_track: dict[str, list[tuple[float, float]]], **options: Any) -> None:
    """Spans in seconds from some origin, told in the order of their ends; the track's name is the category too."""
    origin = time.monotonic()
    told = [(end, start, track) for track, of_track in spans_by_track.items() for start, end in of_track]
    async with ReportWriter().running() as writer:
        trace = await TraceLog.open(writer, run_dir, **options)
        for end, start, track in sorted(told):
            trace.complete("span", track, origin + start, origin + end, track, {"start": start})


def events(run_dir: Path, phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads((run_dir / "trace.json").read_text()) if event["ph"] == phase]


def depth(of_track: list[tuple[float, float]]) -> int:
    """The most spans of positive length that were open at one time."""
    changes = sorted([(start, 1) for start, end in of_track if end > start] + [(e, -1) for s, e in of_track if e > s])
    most = open_now = 0
    for _, change in changes:
        open_now += change
        most = max(most, open_now)
    return most


@given(of_track=spans)
@settings(max_examples=40, deadline=None)
def test_overlapping_spans_get_rows_of_their_own_and_no_more_rows_than_needed(tmp_path_factory, of_track):
    folder = tmp_path_factory.mktemp("trace")
    anyio.run(lambda: write_trace(folder, {"rollouts": of_track}))
    rows: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events(folder):
        rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert all(depth(row) <= 1 for row in rows.values())
    if all(end > start for start, end in of_track):
        assert len(rows) == depth(of_track)
    assert sum(len(row) for row in rows.values()) == len(of_track)


@given(first=spans, second=spans)
@settings(max_examples=40, deadline=None)
def test_overlap_is_the_time_during_which_both_categories_ran(tmp_path_factory, first, second):
    folder = tmp_path_factory.mktemp("trace")
    anyio.run(lambda: write_trace(folder, {"rollouts": first, "train": second}))
    seconds = range(100)
    both = [t for t in seconds if any(s <= t < e for s, e in first) and any(s <= t < e for s, e in second)]
    assert overlap(folder / "trace.json", "rollouts", "train") == pytest.approx(len(both), abs=1e-3)


async def test_rows_are_named_after_their_track(tmp_path):
    await write_trace(tmp_path, {"rollouts": [(0, 5), (1, 6)], "train": [(2, 3)], "other": [(0, 1)]})
    names = {event["tid"]: event["args"]["name"] for event in events(tmp_path, "M") if event["name"] == "thread_name"}
    in_screen_order = [names[row] for row in sorted(names)]
    assert in_screen_order == ["train", "rollouts", "rollouts 2", "other"]
    assert {names[event["tid"]] for event in events(tmp_path)} == set(names.values())


async def test_an_empty_trace_is_valid(tmp_path):
    await write_trace(tmp_path, {})
    assert events(tmp_path) == []


@pytest.mark.parametrize("cut", [1, 4, 20, 100])
async def test_a_trace_cut_short_is_read_up_to_the_cut(tmp_path, cut):
    await write_trace(tmp_path, {"train": [(0, 1), (1, 2), (2, 3)], "rollouts": [(0, 9)]})
    path = tmp_path / "trace.json"
    path.write_bytes(path.read_bytes()[:-cut])
    assert 0 <= overlap(path, "rollouts", "train") <= 3.001


@pytest.mark.parametrize("cut", [0, 1, 20, 100])
async def test_a_resumed_run_continues_the_trace_also_after_a_crash(tmp_path, cut):
    await write_trace(tmp_path, {"train": [(0, 1), (1, 2), (2, 3)]})
    path = tmp_path / "trace.json"
    path.write_bytes(path.read_bytes()[: -cut or None])
    await write_trace(tmp_path, {"train": [(10, 11)]}, resume=True)
    starts = [event["args"]["start"] for event in events(tmp_path)]
    assert starts[-1] == 10
    assert starts[:-1] == [0, 1, 2][: len(starts) - 1]
    assert len(starts) >= 3


async def test_a_resume_over_a_file_without_any_event_begins_anew(tmp_path):
    (tmp_path / "trace.json").write_bytes(b"[\n{half")
    await write_trace(tmp_path, {"train": [(0, 1)]}, resume=True)
    assert len(events(tmp_path)) == 1


async def test_a_fresh_run_replaces_the_trace(tmp_path):
    await write_trace(tmp_path, {"train": [(0, 1), (1, 2)]})
    await write_trace(tmp_path, {"train": [(5, 6)]})
    assert [event["args"]["start"] for event in events(tmp_path)] == [5]


async def test_a_full_trace_says_so_once_and_stops(tmp_path, caplog):
    await write_trace(tmp_path, {"train": [(second, second + 1) for second in range(10)]}, max_events=4)
    assert len(events(tmp_path)) == 4
    assert [event["name"] for event in events(tmp_path, "i")] == ["trace is full: 4 events"]
    assert len([record for record in caplog.records if "trace is full" in record.message]) == 1


async def test_arguments_that_are_not_json_fail_where_they_are_given(tmp_path):
    async with ReportWriter().running() as writer:
        trace = await TraceLog.open(writer, tmp_path)
        with pytest.raises(TypeError):
            trace.complete("span", "train", 0.0, 1.0, "train", {"what": object()})
    assert events(tmp_path) == []


async def test_a_damaged_trace_is_an_error_and_not_a_smaller_overlap(tmp_path):
    await write_trace(tmp_path, {"train": [(0, 1)]})
    path = tmp_path / "trace.json"
    path.write_bytes(path.read_bytes().replace(b'"ph":"X"', b'"ph":X'))
    with pytest.raises(ValueError):
        overlap(path, "train", "train")
