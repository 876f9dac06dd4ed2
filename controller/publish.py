"""Publishing: a group's rows into the train partition, all or none, within a bounded number of deadlines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import anyio
import numpy as np

from dataplane.errors import DataPlaneDown, DataPlaneError, DataPlaneTimeout
from dataplane.plane import Column, DataPlane, Row
from dataplane.schema import ROUTED_EXPERTS, ROUTES_SHAPE, TRAIN
from ledger.verify import VerifiedRow

ATTEMPTS = 3


def train_row(row: VerifiedRow) -> dict[str, Column]:
    """The columns of a verified row."""
    columns: dict[str, Column] = {
        "input_ids": row.input_ids,
        "loss_mask": row.loss_mask,
        "rollout_logprobs": row.rollout_logprobs,
        "weight_versions": row.weight_versions,
    }
    if row.routed_experts is not None:
        columns[ROUTED_EXPERTS] = row.routed_experts
        columns[ROUTES_SHAPE] = np.array(row.routes_shape, np.int32)
    return columns


class Publisher:
    """`counts` adds up the deadlines that puts missed."""

    def __init__(self, plane: DataPlane, counts: Counter[str]) -> None:
        self._plane = plane
        self._counts = counts

    async def publish(self, rows: Mapping[str, Row]) -> str | None:
        """Put the rows; what was wrong when the data plane did not take them in time, and then none is left.

        A cancellation leaves all of them or none. Raises DataPlaneDown, and BadRow or RowExists, which no row of ours can
        cause.
        """
        by_columns: dict[tuple[str, ...], dict[str, Row]] = {}
        for key, row in rows.items():
            by_columns.setdefault(tuple(row), {})[key] = row
        problem = ""
        for _ in range(ATTEMPTS):
            try:
                for alike in by_columns.values():
                    await self._plane.put(TRAIN, alike)
                return None
            except DataPlaneTimeout as e:
                self._counts["puts_timed_out"] += 1
                problem = str(e)
            except anyio.get_cancelled_exc_class():
                await self._take_back(rows)
                raise
            if not await self._take_back(rows):
                break
        return f"{problem} ({ATTEMPTS} attempts)"

    async def _take_back(self, rows: Mapping[str, Row]) -> bool:
        """Clear what an attempt may have left; False when the data plane does not answer to that either."""
        with anyio.CancelScope(shield=True):
            try:
                await self._plane.clear(TRAIN, list(rows))
            except DataPlaneDown:
                raise
            except DataPlaneError:
                return False
        return True
