"""Staged rows on the controller's side: read in batches that are divided when they fail, and cleared.

One bad row costs itself and not the batch. A data plane that is slow costs at most a bounded number of deadlines, and then
the rows that are still missing; one that is down ends the run.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from dataplane.errors import DataPlaneDown, DataPlaneError, DataPlaneTimeout, RowGone, RowMismatch
from dataplane.plane import Column, DataPlane
from dataplane.schema import ROUTED_EXPERTS, STAGING, STAGING_COLUMNS
from dataplane.sink import TokenDelta
from ledger.links import Link
from ledger.reasons import Reason, Rejection
from ledger.receipts import Receipt

READ_DEADLINES = 3
"""How many deadlines the reads of one group may miss."""

Rows: TypeAlias = dict[str, TokenDelta | Rejection]

logger = logging.getLogger(__name__)


class StagedReader:
    """`counts` adds up reads, the failed ones among them, and rows read."""

    def __init__(self, plane: DataPlane, counts: Counter[str]) -> None:
        self._plane = plane
        self._counts = counts

    async def read(self, links: Iterable[Link]) -> Rows:
        """The staged rows of a group's calls, by staging key; a rejection stands for one that cannot be read.

        Raises DataPlaneDown.
        """
        by_columns: dict[tuple[str, ...], dict[str, None]] = {}
        for link in links:
            columns = STAGING_COLUMNS if link.routes is None else (*STAGING_COLUMNS, ROUTED_EXPERTS)
            by_columns.setdefault(columns, {})[link.staging_key] = None
        rows: Rows = {}
        deadlines = READ_DEADLINES
        for columns, keys in by_columns.items():
            batches = [list(keys)]
            while batches:
                batch = batches.pop()
                if deadlines == 0:
                    detail = f"{READ_DEADLINES} reads of the group had no answer in time"
                    rows |= _rejected(batch, Reason.ROWS_UNAVAILABLE, detail)
                    continue
                try:
                    rows |= await self._get(batch, columns)
                except DataPlaneDown:
                    raise
                except DataPlaneTimeout:
                    deadlines -= 1
                    batches += _halves(batch)
                except DataPlaneError as e:
                    rejected, batches_left = _after(e, batch)
                    rows |= rejected
                    batches += batches_left
        return rows

    async def _get(self, keys: Sequence[str], columns: Sequence[str]) -> Rows:
        self._counts["reads"] += 1
        try:
            found = await self._plane.get(STAGING, keys, columns)
        except DataPlaneError:
            self._counts["reads_failed"] += 1
            raise
        self._counts["rows_read"] += len(found)
        return {key: _delta(row) for key, row in zip(keys, found, strict=True)}


def _after(error: DataPlaneError, batch: list[str]) -> tuple[Rows, list[list[str]]]:
    """What is known of a batch whose read failed, and what to read next."""
    named = error.keys if isinstance(error, RowGone | RowMismatch) else ()
    suspects = [key for key in batch if key in set(named)]
    rest = [key for key in batch if key not in set(named)]
    if isinstance(error, RowGone) and suspects:
        return _rejected(suspects, Reason.MISSING_ROW, str(error)), [rest] if rest else []
    if len(batch) == 1:
        reason = Reason.MALFORMED_ROW if isinstance(error, RowMismatch) else Reason.ROWS_UNAVAILABLE
        return _rejected(batch, reason, str(error)), []
    return {}, [suspects, rest] if suspects and rest else _halves(batch)


def _halves(batch: list[str]) -> list[list[str]]:
    middle = (len(batch) + 1) // 2
    return [half for half in (batch[middle:], batch[:middle]) if half]


def _rejected(keys: Iterable[str], reason: Reason, detail: str) -> Rows:
    return {key: Rejection(reason, f"row {key!r}: {detail}") for key in keys}


def _delta(row: dict[str, Column]) -> TokenDelta:
    columns: dict[str, Any] = {name: row[name] for name in STAGING_COLUMNS}
    return TokenDelta(**columns, routed_experts=row.get(ROUTED_EXPERTS))


class StagedCleaner:
    """Clears a group's staged rows: those of its calls, on a chain or not, and what attempts without an answer left behind.

    An attempt that was given up may stage its row later still, so its rollout is looked at again after `late_after_s`.
    """

    def __init__(
        self,
        plane: DataPlane,
        counts: Counter[str],
        *,
        late_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plane = plane
        self._counts = counts
        self._late_after_s = late_after_s
        self._clock = clock
        self._late: deque[tuple[float, str]] = deque()
        self._uncleared: set[str] = set()

    async def clear(self, receipts: Sequence[Receipt], attempts_lost: Iterable[str] = ()) -> None:
        """What cannot be cleared within the plane's deadline is tried again with the next group. Raises DataPlaneDown.

        `attempts_lost`: rollouts whose calls were answered in a second attempt or a later one.
        """
        now = self._clock()
        unanswered = {receipt.rollout_id for receipt in receipts if receipt.orphans} | set(attempts_lost)
        looked_at_again: set[str] = set()
        while self._late and self._late[0][0] <= now:
            looked_at_again.add(self._late.popleft()[1])
        keys = {key for receipt in receipts for key in receipt.staging_keys} | self._uncleared
        self._uncleared = set()
        try:
            orphans = await self._left_by(unanswered | looked_at_again) - keys
            self._counts["rows_cleared"] += await self._plane.clear(STAGING, keys | orphans)
            self._counts["orphans_cleared"] += len(orphans)
            looked_at_again.clear()
        except DataPlaneDown:
            raise
        except DataPlaneError as e:
            logger.warning("%d staged rows are not cleared yet: %s", len(keys), e)
            self._uncleared |= keys
        self._late += [(now + self._late_after_s, rollout_id) for rollout_id in unanswered | looked_at_again]

    async def _left_by(self, rollout_ids: set[str]) -> set[str]:
        if not rollout_ids:
            return set()
        prefix = f"{next(iter(rollout_ids))}/" if len(rollout_ids) == 1 else ""
        keys = await self._plane.keys(STAGING, prefix=prefix)
        return {key for key in keys if key.rpartition("/")[0] in rollout_ids}
