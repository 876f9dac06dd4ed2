"""Which error ended a run: the first one that happened; the death of a process, or of the ledger, before what it caused."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Iterator
from typing import cast

from dataplane.errors import DataPlaneDown
from ledger.errors import JournalFailed
from workers.launch import WorkerDied
from workers.rpc.errors import WorkerUnreachable


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group, nested ones too, in the order in which they happened; an error itself if it is no group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in cast(BaseExceptionGroup[BaseException], error).exceptions:
            yield from leaves(inner)
    else:
        yield error


def first_error(error: BaseException) -> BaseException:
    """The error that explains the others: a dead worker, a broken ledger, else the first that is no cancellation."""
    found = list(leaves(error))
    for kind in (WorkerDied, JournalFailed):
        for leaf in found:
            cause = next((e for e in _causes(leaf) if isinstance(e, kind)), None)
            if cause is not None:
                return cause
    # A cancellation that happened first is how another error made its way through the task groups.
    return next((leaf for leaf in found if not isinstance(leaf, CancelledError)), found[0])


def lost_connection(error: BaseException) -> bool:
    """Whether the error is, or was caused by, a process that no longer answers: its death may be known in a moment."""
    return any(isinstance(cause, WorkerUnreachable | DataPlaneDown) for cause in explanations(error))


def explanations(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group, or the error itself, each with what it was raised from."""
    for leaf in leaves(error):
        yield from _causes(leaf)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from, each once: an error that is raised from itself is its own cause."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__
