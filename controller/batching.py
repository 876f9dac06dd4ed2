"""Which rows share a forward pass: decided from lengths alone, so that padding is small and memory is bounded."""

from __future__ import annotations

from collections.abc import Sequence

from workers.training.api import TrainRow


def plan_microbatches(rows: Sequence[TrainRow], max_tokens: int) -> list[tuple[TrainRow, ...]]:
    """Split rows into microbatches of at most `max_tokens` padded tokens (rows times longest row).

    Rows are sorted by length, so neighbours pad little. A single row longer than `max_tokens` gets a microbatch of its
    own: it cannot be split. Every row is in exactly one microbatch; the same rows give the same plan.
    """
    batches: list[tuple[TrainRow, ...]] = []
    current: list[TrainRow] = []
    for row in sorted(rows, key=lambda r: (-r.length, r.key)):
        # Descending order: the first row of a microbatch is its longest.
        if current and (len(current) + 1) * current[0].length > max_tokens:
            batches.append(tuple(current))
            current = []
        current.append(row)
    if current:
        batches.append(tuple(current))
    return batches
