"""Which error ended a run: the first one that happened, and the death of a process before the errors that it caused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from dataplane.errors import DataPlaneDown
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
    """The error that explains the others: a dead worker if there is one among them, else the first."""
    found = list(leaves(error))
    return next((e for e in found if isinstance(e, WorkerDied)), found[0])


def lost_connection(error: BaseException) -> bool:
    """Whether the error is, or was caused by, a process that no longer answers: its death may be known in a moment."""
    for leaf in leaves(error):
        cause: BaseException | None = leaf
        while cause is not None:
            if isinstance(cause, WorkerUnreachable | DataPlaneDown):
                return True
            cause = cause.__cause__
    return False
