"""The verbs that a plane is built from, on a TransferQueue with any storage behind its controller.

TransferQueue answers "done" to some requests that were not done, and retries dead servers for long. A verb of a `Store` that
returns has taken effect, and a server that does not answer is a `NoAnswer`. Everything runs on one loop, the private one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transfer_queue.metadata import BatchMeta

    from dataplane.ragged import Batch


class NoAnswer(Exception):
    """A storage server did not answer, though asked more than once."""


class Vanished(Exception):
    """A row was removed by another process while it was being read."""


class Store(Protocol):
    """One client of the servers. It belongs to no process-wide state: a process can hold several."""

    reads_in_place: bool
    """Whether `read` takes rows from memory that may meanwhile be cleared, and written anew, by another process: they are
    what was asked for only if they are still found after it."""
    retries: int
    """Requests that were sent again because a storage server did not answer, so far."""

    async def find(self, partition: str, keys: Sequence[str]) -> BatchMeta:
        """Those of `keys` that occupy the partition, readable or not; the meta's fields are those that all can serve."""
        ...

    async def names(self, partition: str, meta: BatchMeta) -> list[str]:
        """The keys of found rows."""
        ...

    async def create(self, partition: str, keys: Sequence[str]) -> BatchMeta:
        """Occupy keys: from here on they must be written or erased."""
        ...

    async def write(self, meta: BatchMeta, batch: Batch) -> None:
        """Store a batch, each row by itself: of what is stored together, one surviving row would keep the memory of all.

        That it became readable must be verified with `find`: TransferQueue ignores a refusal there.
        """
        ...

    async def read(self, meta: BatchMeta, columns: Sequence[str]) -> Mapping[str, Sequence[Any]]:
        """The found rows' columns, each with one 1-D tensor per row in the meta's order. Raises Vanished.

        What comes back is not proven to be that: `codec.unpack` does it.
        """
        ...

    async def erase(self, meta: BatchMeta) -> None:
        """Free rows in whatever state they are. Only when their storage has dropped them are their numbers released.

        Raises NoAnswer with the rows unreadable but still occupied; erasing them again is safe.
        """
        ...

    async def keys(self, partition: str) -> list[str]:
        """All keys that occupy the partition."""
        ...

    def close(self) -> None:
        """Close the sockets; nothing may be under way. The servers do not notice. Blocks, for at most 5 s."""
        ...
