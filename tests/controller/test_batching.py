"""Microbatch plans: every row once, padded tokens within the bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.batching import plan_microbatches
from workers.training.api import TrainRow


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(1, 400))
def test_every_row_once_within_the_bound(lengths: list[int], max_tokens: int) -> None:
    rows = [TrainRow(key=f"r{i}", advantage=0.0, length=n) for i, n in enumerate(lengths)]
    plan = plan_microbatches(rows, max_tokens)
    assert sorted(r.key for batch in plan for r in batch) == sorted(r.key for r in rows)
    for batch in plan:
        padded = len(batch) * max(r.length for r in batch)
        assert padded <= max_tokens or len(batch) == 1
    assert plan == plan_microbatches(list(reversed(rows)), max_tokens)


def test_equal_rows_fill_a_microbatch_exactly() -> None:
    rows = [TrainRow(key=f"r{i}", advantage=0.0, length=10) for i in range(8)]
    assert [len(b) for b in plan_microbatches(rows, 40)] == [4, 4]
