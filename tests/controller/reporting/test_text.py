"""Numbers and foreign text as a terminal shows them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.reporting.text import clean_line, duration, number, sparkline

finite = st.floats(-1e300, 1e300)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0s"),
        (0.42, "0.4s"),
        (12.4, "12s"),
        (59.9, "1m 00s"),
        (245, "4m 05s"),
        (3599.9, "1h 00m"),
        (11220, "3h 07m"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.4123, "0.412"),
        (-0.01234, "-0.0123"),
        (7.2, "7.20"),
        (57.5, "57.5"),
        (1840.4, "1,840"),
        (2e-4, "2.00e-04"),
        (3.2e10, "3.20e+10"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


@given(value=finite, digits=st.integers(1, 6))
def test_a_number_reads_back_close_to_itself(value, digits):
    shown = float(number(value, digits).replace(",", ""))
    assert shown == pytest.approx(value, rel=0.6 * 10 ** (1 - digits), abs=1e-300)


@given(values=st.lists(finite, max_size=50), ascii_only=st.booleans())
def test_a_sparkline_has_one_character_per_value_in_the_values_order(values, ascii_only):
    bars = "_.-~=*#@" if ascii_only else "▁▂▃▄▅▆▇█"
    heights = [bars.index(character) for character in sparkline(values, ascii_only=ascii_only)]
    assert len(heights) == len(values)
    for (low, low_height), (high, high_height) in zip(
        sorted(zip(values, heights, strict=True)), sorted(zip(values, heights, strict=True))[1:], strict=False
    ):
        assert low <= high
        assert low_height <= high_height


def test_a_worker_s_line_cannot_steer_the_terminal():
    assert clean_line("\x1b[31mred\x1b[0m \x1b]0;title\x07text\x1b[2J\r\n") == "red text"
    assert clean_line("10%\r20%\x08\x9b2J") == "10%20%2J"
    assert len(clean_line("x" * 100_000)) < 2100


@given(line=st.text())
def test_no_control_character_survives(line):
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in clean_line(line))
