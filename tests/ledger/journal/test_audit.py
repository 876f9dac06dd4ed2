"""The audit finds the first event that cannot be what was recorded, whoever altered it, and says where it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ledger.audit import Audit, audit
from ledger.events import (
    CallCommitted,
    Event,
    GroupDispatched,
    GroupEnd,
    RolloutAborted,
    RolloutEvent,
    RolloutFinalized,
    RolloutSealed,
)
from ledger.segments import JournalReader, Place, current_files, segment_path
from tests.ledger.journal.histories import history, standing
from tests.ledger.journal.opened import write

EVENTS = list(history(groups=3, live=1, seed=3))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("journals") / "ledger"
    anyio.run(lambda: write(folder, EVENTS, segment_bytes=9000))
    assert len(current_files(folder)) > 2
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "ledger")


def frames_of(path: Path) -> list[tuple[int, int]]:
    """Where each frame of a file begins and ends."""
    starts = [f.frame.offset for f in JournalReader(current_files(path.parent)) if f.path == path]
    return list(zip(starts, [*starts[1:], path.stat().st_size], strict=True))


def test_a_healthy_journal_is_sound(folder: Path):
    found = audit(folder)
    assert found.sound
    assert found.broken is None
    assert found.torn is None
    assert (found.events, found.frames, found.files) == (len(EVENTS), len(EVENTS), len(current_files(folder)))
    assert found.account == standing(EVENTS)["account"]
    finished = [e for e in EVENTS if isinstance(e, RolloutFinalized | RolloutAborted)]
    assert found.verdicts.total() == len(finished)
    assert found.verdicts["aborted"] == sum(isinstance(e, RolloutAborted) for e in finished)


def test_a_torn_tail_is_told_and_is_no_fault(folder: Path):
    path = current_files(folder)[-1].path
    start, end = frames_of(path)[-1]
    with path.open("r+b") as file:
        file.truncate(end - 3)
    before = path.read_bytes()
    found = audit(folder)
    assert found.sound
    assert found.torn is not None
    assert found.torn.place == Place(path, start)
    assert found.events == len(EVENTS) - 1
    assert path.read_bytes() == before


@pytest.mark.parametrize("frame", [0, 3, -2])
def test_one_edited_byte_is_named(folder: Path, frame: int):
    path = segment_path(folder, 2)
    start, end = frames_of(path)[frame]
    data = bytearray(path.read_bytes())
    data[(start + end) // 2] ^= 1
    path.write_bytes(data)
    assert audit(folder).broken == (Place(path, start), "the frame's CRC is wrong")


@pytest.mark.parametrize("frame", [0, 3, -2])
def test_one_removed_frame_is_named(folder: Path, frame: int):
    path = segment_path(folder, 2)
    start, end = frames_of(path)[frame]
    data = path.read_bytes()
    path.write_bytes(data[:start] + data[end:])
    place, why = broken(audit(folder))
    assert place == Place(path, start)
    assert "stands where frame" in why


def test_a_frame_removed_from_the_end_of_a_segment_is_missed_by_the_next(folder: Path):
    path = segment_path(folder, 1)
    start, _ = frames_of(path)[-1]
    path.write_bytes(path.read_bytes()[:start])
    place, why = broken(audit(folder))
    assert place == Place(segment_path(folder, 2), 0)
    assert "the file before it ends at" in why


def test_two_swapped_frames_are_named(folder: Path):
    path = segment_path(folder, 2)
    (a, b), (c, d) = frames_of(path)[2], frames_of(path)[5]
    data = path.read_bytes()
    path.write_bytes(data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:])
    assert broken(audit(folder))[0] == Place(path, a)


def test_what_stands_before_the_broken_event_is_still_counted(folder: Path):
    path = segment_path(folder, 2)
    path.write_bytes(path.read_bytes()[:-1])
    found = audit(folder)
    before = sum(len(f.frame.events) for f in JournalReader(current_files(folder)[:2]))
    assert found.events == before
    assert found.account == standing(EVENTS[:before])["account"]


def broken(found: Audit) -> tuple[Place, str]:
    assert not found.sound
    assert found.broken is not None
    return found.broken


def forged(ram: Path, events: list[Event]) -> Audit:
    """A journal of other events, every frame of it as it should be: only the events can contradict each other."""
    folder = ram / str(len(list(ram.iterdir())))
    anyio.run(lambda: write(folder, events))
    found = audit(folder)
    if found.broken is not None:
        place, _ = found.broken
        offsets = {
            (f.path, f.place(i).offset)
            for f in JournalReader(current_files(folder))
            for i in range(len(f.frame.events))
        }
        assert tuple(place) in offsets, "the place is that of an event"
    return found


CLOSED = {e.rollout_id for e in EVENTS if isinstance(e, RolloutFinalized | RolloutAborted)}
COVERED = [
    i
    for i, e in enumerate(EVENTS)
    if isinstance(e, RolloutEvent) and e.rollout_id in CLOSED and not isinstance(e, RolloutFinalized | RolloutAborted)
]
"""Events that a head in a later one covers."""


def closing(i: int) -> int:
    """The place of the event that closes the rollout of event `i`."""
    rollout_id = EVENTS[i].rollout_id
    return next(
        j
        for j, e in enumerate(EVENTS)
        if isinstance(e, RolloutFinalized | RolloutAborted) and e.rollout_id == rollout_id
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(COVERED))
def test_a_dropped_event_is_found_although_every_frame_is_right(ram: Path, i: int):
    found = forged(ram, EVENTS[:i] + EVENTS[i + 1 :])
    broken(found)
    assert i <= found.events < closing(i)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(COVERED), st.data())
def test_reordered_events_are_found_although_every_frame_is_right(ram: Path, i: int, data: st.DataObject):
    same = [j for j in COVERED if EVENTS[j].rollout_id == EVENTS[i].rollout_id and j != i]
    j = data.draw(st.sampled_from(same))
    events = list(EVENTS)
    events[i], events[j] = events[j], events[i]
    found = forged(ram, events)
    broken(found)
    assert min(i, j) <= found.events <= closing(i)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([i for i in COVERED if isinstance(EVENTS[i], CallCommitted)]), st.data())
def test_an_edited_event_is_found_although_every_frame_is_right(ram: Path, i: int, data: st.DataObject):
    event = EVENTS[i]
    assert isinstance(event, CallCommitted)
    field = data.draw(st.sampled_from(["digest", "prev_len", "chain_hash", "weight_spans", "staging_key"]))
    value = getattr(event.coords, field)
    other = {str: lambda: value[::-1] + "0", int: lambda: value + 1, tuple: lambda: value * 2}[type(value)]()
    coords = msgspec.structs.replace(event.coords, **{field: other})
    events = list(EVENTS)
    events[i] = msgspec.structs.replace(event, coords=coords)
    found = forged(ram, events)
    _, why = broken(found)
    assert i <= found.events <= closing(i)
    assert event.rollout_id in why


def test_a_verdict_that_the_events_contradict_is_found(ram: Path):
    failed = {e.rollout_id for e in EVENTS if isinstance(e, RolloutSealed) and e.failure is not None}
    i, event = next((i, e) for i, e in enumerate(EVENTS) if isinstance(e, RolloutFinalized) and e.rollout_id in failed)
    events = list(EVENTS)
    events[i] = msgspec.structs.replace(event, reason=None)
    found = forged(ram, events)
    assert f"RolloutFinalized: rollout '{event.rollout_id}' is rejected by its events" in broken(found)[1]
    assert found.events == i


def test_a_second_end_of_a_group_is_found(ram: Path):
    i = next(i for i, e in enumerate(EVENTS) if isinstance(e, GroupEnd))
    found = forged(ram, [*EVENTS[: i + 1], EVENTS[i], *EVENTS[i + 1 :]])
    assert "is not live" in broken(found)[1]
    assert found.events == i + 1


def test_a_rollout_that_was_never_dispatched_is_found(ram: Path):
    i = next(i for i, e in enumerate(EVENTS) if isinstance(e, GroupDispatched))
    found = forged(ram, EVENTS[:i] + EVENTS[i + 1 :])
    assert "never dispatched" in broken(found)[1]
    assert found.events == i
