"""Numbers, durations and foreign text as a terminal shows them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-~=*#@"
_ESCAPES = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_MAX_LINE = 2000


def duration(seconds: float) -> str:
    """`0.4s`, `12s`, `4m 05s`, `3h 07m`."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits at least, `-` for None; thousands are grouped, the tiny and the huge have exponents."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.0f}%"


def sparkline(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """One character per value, from the lowest bar (the least of them) to the highest."""
    bars = _ASCII_BARS if ascii_only else _BARS
    if not values:
        return ""
    low, high = min(values), max(values)
    if not high > low:
        return bars[0] * len(values)
    # Halved before the subtraction, which could overflow.
    return "".join(bars[round((v / 2 - low / 2) / (high / 2 - low / 2) * (len(bars) - 1))] for v in values)


def clean_line(line: str) -> str:
    """A line from a worker, safe to print: no escape sequences or control characters, of bounded length."""
    text = _CONTROLS.sub("", _ESCAPES.sub("", line.rstrip("\r\n"))).expandtabs(4)
    return text if len(text) <= _MAX_LINE else text[:_MAX_LINE] + " [...]"
