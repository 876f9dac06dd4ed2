"""What TransferQueue does not promise, on top of its verbs: rows written once, put wholly or not at all, proven on reading.

Runs on the private loop. Every error that leaves here is a `DataPlaneError`.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NoReturn

import anyio
import torch

from dataplane.codec import ROW_ID, pack, unpack
from dataplane.errors import BadRow, DataPlaneError, DataPlaneTimeout, RowExists, RowGone, RowMismatch
from dataplane.janitor import Debts
from dataplane.metrics import Metrics
from dataplane.plane import Column, Row
from dataplane.ragged import Batch
from dataplane.rows import check_rows, dtype_problem
from dataplane.store import NoAnswer, Store, Vanished

_log = logging.getLogger(__name__)

ROLLBACK_TIMEOUT_S = 10.0
CLEARED_AT_ONCE = 1024
"""Rows. TransferQueue's client unpickles what is known of them in one piece, for 1 ms in which no other thread runs."""


class RowStore:
    """The operations of `DataPlane` without their deadlines and their order, which are the plane's.

    One that fails or is cut short may leave keys occupied that must be free: they are among the `debts` then.
    """

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self.debts = Debts()
        self._store = store
        self._metrics = metrics

    async def put(self, partition: str, rows: Mapping[str, Row]) -> None:
        """Write rows, or raise and leave none. After DataPlaneTimeout("unknown") the keys are owed."""
        keys = list(rows)
        with _typed("put", partition, outcome="none"):
            check_rows(partition, rows)
            if not keys:
                return
            if owed := self.debts.among(partition, keys):
                await self.clear(partition, owed)
            with self._metrics.timed("encode"):
                batch = pack(partition, rows)
            present = await self._store.find(partition, keys)
            if present.size:
                names = await self._store.names(partition, present)
                raise RowExists("a row is written once", partition=partition, keys=names)
            try:
                await self._store.write(await self._store.create(partition, keys), batch)
                await self._verify(partition, keys, batch)
            except Exception as error:
                if not await self._taken_back(partition, keys):
                    seconds = ROLLBACK_TIMEOUT_S
                    raise DataPlaneTimeout("put", partition=partition, seconds=seconds, outcome="unknown") from error
                raise
            except BaseException:
                self.debts.add(partition, keys)
                raise

    async def get(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> list[dict[str, Column]]:
        """Read rows; one that is not wholly written counts as gone."""
        unique = list(dict.fromkeys(keys))
        if not unique:
            return []
        with _typed("get", partition, outcome="none"):
            if owed := self.debts.among(partition, unique):
                raise RowGone("was to be cleared", partition=partition, keys=owed)
            meta = await self._store.find(partition, unique)
            wanted = {*columns, ROW_ID}
            if meta.size != len(unique) or not wanted <= set(meta.field_names):
                await self._refuse(partition, unique, wanted)
            try:
                found = await self._store.read(meta, sorted(wanted))
                if self._store.reads_in_place:
                    still = await self._store.find(partition, unique)
                    if still.global_indexes != meta.global_indexes or not wanted <= set(still.field_names):
                        raise Vanished
            except Vanished as error:
                message = "cleared while it was being read"
                raise RowGone(message, partition=partition, keys=unique) from error
            dtypes = {name: meta.field_schema[name]["dtype"] for name in wanted}
            with self._metrics.timed("decode"):
                rows = dict(zip(unique, unpack(partition, unique, columns, found, dtypes), strict=True))
        if len(keys) == len(unique):
            return list(rows.values())
        return [{name: column.copy() for name, column in rows[key].items()} for key in keys]

    async def clear(self, partition: str, keys: Sequence[str]) -> int:
        """Free the keys that are occupied, readable or not. When this fails they are owed."""
        if not keys:
            return 0
        with _typed("clear", partition, outcome="unknown"):
            try:
                cleared = 0
                for begin in range(0, len(keys), CLEARED_AT_ONCE):
                    meta = await self._store.find(partition, keys[begin : begin + CLEARED_AT_ONCE])
                    if meta.size:
                        await self._store.erase(meta)
                    cleared += meta.size
            except BaseException:
                self.debts.add(partition, keys)
                raise
            self.debts.settle(partition, keys)
            return cleared

    async def keys(self, partition: str, prefix: str) -> list[str]:
        """The occupied keys, sorted."""
        with _typed("keys", partition, outcome="none"):
            return sorted(key for key in await self._store.keys(partition) if key.startswith(prefix))

    async def _verify(self, partition: str, keys: Sequence[str], batch: Batch) -> None:
        """TransferQueue calls a put done that its controller refused, or never heard of. What counts is what it says now."""
        meta = await self._store.find(partition, keys)
        for name, column in batch.items():
            stored = meta.field_schema.get(name, {}).get("dtype", column.dtype)
            if stored != column.dtype:
                raise BadRow(dtype_problem(name, _plain(stored), _plain(column.dtype)), partition=partition, keys=keys)
        if meta.size != len(keys) or not set(batch) <= set(meta.field_names):
            raise DataPlaneError(f"put on partition {partition!r}: TransferQueue did not make the rows readable")

    async def _taken_back(self, partition: str, keys: Sequence[str]) -> bool:
        try:
            with anyio.fail_after(ROLLBACK_TIMEOUT_S):
                await self.clear(partition, keys)
        except (DataPlaneError, TimeoutError) as error:
            _log.error("could not take back a failed put of %d rows on %r: %r", len(keys), partition, error)
            return False
        return True

    async def _refuse(self, partition: str, keys: Sequence[str], wanted: set[str]) -> NoReturn:
        """Say which of the keys cannot be read, and why."""
        gone: list[str] = []
        lacking: list[str] = []
        for key in keys:
            meta = await self._store.find(partition, [key])
            if not meta.size or ROW_ID not in meta.field_names:
                gone.append(key)
            elif not wanted <= set(meta.field_names):
                lacking.append(key)
        if gone:
            raise RowGone("no such row", partition=partition, keys=gone)
        if lacking:
            columns = sorted(wanted - {ROW_ID})
            raise RowMismatch(f"not all of the columns {columns} are there", partition=partition, keys=lacking)
        raise RowGone("was still being written", partition=partition, keys=keys)


@contextmanager
def _typed(operation: str, partition: str, *, outcome: Literal["none", "unknown"]) -> Generator[None]:
    started = anyio.current_time()
    try:
        yield
    except DataPlaneError:
        raise
    except NoAnswer as error:
        seconds = anyio.current_time() - started
        raise DataPlaneTimeout(operation, partition=partition, seconds=seconds, outcome=outcome) from error
    except Exception as error:
        raise DataPlaneError(f"{operation} on partition {partition!r} failed in TransferQueue: {error}") from error


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
