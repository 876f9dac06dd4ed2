"""The lag histogram: constant in size, and an upper bound of each quantile."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from controller.sentinel.lag import LagHistogram


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=200), st.sampled_from([0.0, 0.5, 0.99, 0.999, 1.0]))
def test_a_quantile_is_bounded_from_above_and_close(lags: list[float], q: float) -> None:
    histogram = LagHistogram()
    for lag in lags:
        histogram.add(lag)
    exact = float(np.quantile(lags, q, method="inverted_cdf"))
    found = histogram.quantile(q)
    assert exact <= found <= max(exact * 1.334 + 1e-3, 0.1) or found == histogram.max_ms
    assert histogram.quantile(1.0) == histogram.max_ms == max(lags)


def test_figures_count_the_beats_over_each_bound() -> None:
    histogram = LagHistogram()
    for lag in (0.2, 1.0, 1.5, 4.0, 40.0, 2000.0):
        histogram.add(lag)
    figures = histogram.figures()
    assert figures["beats"] == 6
    assert [figures[f"beats_over_{ms}_ms"] for ms in (1, 3, 5, 10, 30, 100, 1000)] == [4, 3, 2, 2, 2, 1, 1]
    assert LagHistogram().figures()["lag_max_ms"] == LagHistogram().figures()["lag_p999_ms"] == 0.0
