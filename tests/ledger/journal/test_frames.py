"""Whatever happens to the bytes, the frames before the damage are read whole, and it is known where the damage is."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.events import Event, encode
from ledger.frames import MAX_PAYLOAD, START, FrameBuilder, FrameFault, FrameReader, Link, UnknownEvents
from tests.ledger.journal.histories import history


def framed(events: list[Event], link: Link = START) -> tuple[bytearray, Link]:
    builder = FrameBuilder()
    for event in events:
        builder.add(event)
    return builder.seal(link)


def written(batches: list[list[Event]]) -> list[bytes]:
    frames, link = [], START
    for batch in batches:
        frame, link = framed(batch, link)
        frames.append(bytes(frame))
    return frames


def read(data: bytes) -> tuple[list[list[Event]], FrameFault | None]:
    batches: list[list[Event]] = []
    try:
        batches.extend(frame.events for frame in FrameReader(data, 0, START))
    except FrameFault as fault:
        return batches, fault
    return batches, None


@st.composite
def batched(draw: st.DrawFn) -> list[list[Event]]:
    events = list(history())[: draw(st.integers(1, 12))]
    cuts = sorted(draw(st.sets(st.integers(1, len(events) - 1)))) if len(events) > 1 else []
    return [events[a:b] for a, b in zip([0, *cuts], [*cuts, len(events)], strict=True)]


@given(batched())
def test_frames_are_read_as_they_were_written(batches):
    data = b"".join(written(batches))
    assert read(data) == (batches, None)


@given(batched(), st.data())
def test_each_event_has_its_own_place(batches, data):
    joined = b"".join(written(batches))
    for frame in FrameReader(joined, 0, START):
        i = data.draw(st.integers(0, len(frame.events) - 1))
        assert joined[frame.offset_of(i) :].startswith(encode(frame.events[i]))


def test_a_cut_at_any_byte_leaves_the_frames_before_it():
    batches = [[e] for e in history()[:8]]
    frames = written(batches)
    data = b"".join(frames)
    ends = [sum(map(len, frames[: i + 1])) for i in range(len(frames))]
    for size in range(len(data)):
        whole = sum(end <= size for end in ends)
        found, fault = read(data[:size])
        assert found == batches[:whole]
        at = ends[whole - 1] if whole else 0
        assert fault is None if size == at else (fault.offset, fault.later) == (at, False)


def test_a_flipped_bit_at_any_byte_leaves_the_frames_before_it_and_shows_where_it_is():
    batches = [[e] for e in history()[:6]]
    frames = written(batches)
    data = b"".join(frames)
    starts = [sum(map(len, frames[:i])) for i in range(len(frames))]
    for offset in range(len(data)):
        damaged = max(i for i, start in enumerate(starts) if start <= offset)
        altered = bytearray(data)
        altered[offset] ^= 1 << offset % 8
        found, fault = read(bytes(altered))
        assert found == batches[:damaged]
        assert fault is not None
        assert fault.offset == starts[damaged]
        assert fault.later == (damaged < len(frames) - 1), "what follows an altered frame shows that it was durable"


@given(batched(), st.data())
def test_a_removed_frame_shows_where_it_was(batches, data):
    frames = written(batches)
    gone = data.draw(st.integers(0, len(frames) - 1))
    found, fault = read(b"".join(frames[:gone] + frames[gone + 1 :]))
    assert found == batches[:gone]
    if gone == len(frames) - 1:
        assert fault is None, "a shorter journal is a journal"
    else:
        assert (fault.offset, fault.later) == (sum(map(len, frames[:gone])), True)
        assert f"frame {gone + 1} stands where frame {gone} belongs" in str(fault)


@given(batched().filter(lambda b: len(b) > 1), st.data())
def test_swapped_frames_show_where_they_are(batches, data):
    frames = written(batches)
    i, j = sorted(data.draw(st.sets(st.integers(0, len(frames) - 1), min_size=2, max_size=2)))
    frames[i], frames[j] = frames[j], frames[i]
    found, fault = read(b"".join(frames))
    assert found == batches[:i]
    assert (fault.offset, fault.later) == (sum(map(len, frames[:i])), True)


@given(batched().filter(lambda b: len(b) > 1), st.data())
def test_bytes_put_between_frames_show_where_they_are(batches, data):
    frames = written(batches)
    at = data.draw(st.integers(0, len(frames) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=40))
    found, fault = read(b"".join([*frames[:at], junk, *frames[at:]]))
    assert found == batches[:at]
    assert (fault.offset, fault.later) == (sum(map(len, frames[:at])), True)


@given(batched().filter(lambda b: len(b) > 1), st.data())
def test_an_altered_frame_with_a_crc_of_its_own_is_contradicted_by_the_next(batches, data):
    frames = written(batches)
    i = data.draw(st.integers(0, len(frames) - 2))
    original = b"".join(frames[: i + 1])
    link = START if i == 0 else Link(i, zlib_crc_of(frames[i - 1]))
    frames[i] = bytes(framed([*batches[i], batches[i][-1]], link)[0])
    found, fault = read(b"".join(frames))
    assert len(found) == i + 1
    assert "the frame before it was altered" in str(fault)
    assert fault.offset == len(b"".join(frames[: i + 1])) != len(original)


def zlib_crc_of(frame: bytes) -> int:
    return zlib.crc32(frame[24:], zlib.crc32(frame[:20]))


def test_an_intact_frame_of_something_else_is_no_torn_tail():
    builder = FrameBuilder()
    builder.add(history()[0])
    frame, _ = builder.seal(START)
    payload = b"\xdd\x00\x00\x00\x01" + encode(history()[0]).replace(b"GroupDispatched", b"GroupBewitched!"[:15])
    altered = bytearray(frame[:20]) + b"\0\0\0\0" + payload
    altered[20:24] = zlib.crc32(payload, zlib.crc32(altered[:20])).to_bytes(4, "little")
    with pytest.raises(UnknownEvents, match="GroupBewitched"):
        list(FrameReader(bytes(altered), 0, START))


def test_a_header_that_claims_too_much_is_none():
    frame = bytearray(framed([history()[0]])[0])
    frame[4:8] = (MAX_PAYLOAD + 1).to_bytes(4, "little")
    found, fault = read(bytes(frame))
    assert found == []
    assert "is not possible" in str(fault)
    assert not fault.later
