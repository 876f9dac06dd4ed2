"""Sees to it that keys which must be free become free: what a clear or a rollback could not do is done as soon as it can be.

Such a key is owed. An owed key has no row, whatever the servers say: a get calls it gone, a put clears it first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

import anyio

from dataplane.errors import DataPlaneDown, DataPlaneError
from dataplane.operation import Footprint
from dataplane.private_loop import PrivateLoop
from dataplane.scheduler import Scheduler

_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class Debts:
    """The owed keys, by partition. `on_new` is told the partition in which a key came to be owed. On the private loop."""

    def __init__(self) -> None:
        self.on_new: Callable[[str], None] = lambda _: None
        self._keys: dict[str, set[str]] = {}

    @property
    def count(self) -> int:
        return sum(map(len, list(self._keys.values())))

    def add(self, partition: str, keys: Collection[str]) -> None:
        self._keys.setdefault(partition, set()).update(keys)
        self.on_new(partition)

    def settle(self, partition: str, keys: Collection[str]) -> None:
        """The keys are free."""
        owed = self._keys.get(partition)
        if owed is not None:
            owed.difference_update(keys)
            if not owed:
                del self._keys[partition]

    def among(self, partition: str, keys: Sequence[str]) -> list[str]:
        """Those of `keys` that are owed, in their order."""
        owed = self._keys.get(partition)
        return [key for key in keys if key in owed] if owed else []

    def of(self, partition: str) -> list[str]:
        return sorted(self._keys.get(partition, ()))


class Janitor:
    """Clears the owed keys with pauses that grow from 0.5 s to 30 s, in order with the plane's other operations.

    `clear` is the plane's own, which settles the debts when it succeeds. Runs on the private loop.
    """

    def __init__(
        self,
        private: PrivateLoop,
        scheduler: Scheduler,
        debts: Debts,
        clear: Callable[[str, Sequence[str]], Awaitable[object]],
    ) -> None:
        self.attempts = 0
        """So far."""
        self._private = private
        self._scheduler = scheduler
        self._debts = debts
        self._clear = clear
        self._partitions: set[str] = set()
        debts.on_new = self._look_after

    def _look_after(self, partition: str) -> None:
        if partition not in self._partitions:
            self._partitions.add(partition)
            self._private.spawn_service(partial(self._work, partition))

    async def _work(self, partition: str) -> None:
        pause = FIRST_PAUSE_S
        while keys := self._debts.of(partition):
            await anyio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            try:
                await self._attempt(partition, keys)
            except DataPlaneDown:
                return
            except DataPlaneError as error:
                _log.warning("%d rows of %r are not freed yet: %s", len(keys), partition, error)
        self._partitions.discard(partition)

    async def _attempt(self, partition: str, keys: Sequence[str]) -> None:
        self.attempts += 1

        async def clear_owed() -> None:
            # Meanwhile a caller's own clear may have freed a key, and a put written it anew.
            await self._clear(partition, self._debts.among(partition, keys))

        footprint = Footprint(partition, frozenset(keys), writes=True)
        await self._scheduler.run("clear", footprint, clear_owed, timeout=math.inf)
