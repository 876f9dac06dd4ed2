"""The ledger's events on disk. What was acknowledged is there after a crash, in order, or an error says what is not.

One thread writes. While it waits for the disk, events gather for the next frame, so that all who wait share one write.
After a failed write nothing more is taken: what is in memory may then be ahead of the disk, and the run has to end.

Memory holds the events that are not written yet, and no others.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Literal, TypeAlias

import anyio
import anyio.lowlevel
import anyio.to_thread

from ledger.compaction import compact
from ledger.errors import JournalFailed, LedgerError
from ledger.events import CheckpointMarked, Event
from ledger.frames import FRAME_BYTES, FrameBuilder
from ledger.segments import JournalReader
from ledger.writer import Opened, SegmentWriter, open_folder

Durability: TypeAlias = Literal["batch", "none"]
"""batch: an event is acknowledged once it is on the disk. none: at once; a crash of the machine can lose the newest ones."""

TOLD_AT_ONCE = 8
"""Waiters that are woken in one turn of the loop."""
MAX_FULL = 256
"""With durability none, an append waits while more full frames than this are not written."""

logger = logging.getLogger(__name__)


class _Batch(FrameBuilder):
    """The events of the frame that is written next, or is being written, and those who wait for it."""

    __slots__ = ("checkpoint", "failure", "waiters")

    def __init__(self) -> None:
        super().__init__()
        self.checkpoint = False
        """Whether it holds a `CheckpointMarked`."""
        self.waiters: list[asyncio.Future[None]] = []
        """Futures rather than an event, which costs more than all else in an append."""
        self.failure: JournalFailed | None = None


class Journal:
    """An `EventLog`. Begins with `open`, ends with `aclose`; for the loop that opened it."""

    def __init__(self, writer: SegmentWriter, folder: Path, history_bytes: int, close_timeout_s: float) -> None:
        self._writer = writer
        self._folder = folder
        self._history_bytes = history_bytes
        self._close_timeout_s = close_timeout_s
        self._loop = asyncio.get_running_loop()
        self._gathering = _Batch()
        self._full: deque[_Batch] = deque()
        self._busy = False
        """Whether the thread has a frame, or is about to get one."""
        self._refusal: JournalFailed | None = None
        """What an append gets now."""
        self._failure: JournalFailed | None = None
        """Of the thread."""
        self._closing = False
        self._ended = anyio.Event()
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        # A daemon: what it is stuck in dies with the process.
        Thread(target=self._work, name="ledger journal", daemon=True).start()

    @classmethod
    async def open(
        cls,
        folder: Path,
        *,
        durability: Durability = "batch",
        segment_bytes: int = 16 << 20,
        history_bytes: int = 1 << 30,
        close_timeout_s: float = 10.0,
    ) -> tuple[Journal, Iterator[Event]]:
        """The journal in `folder`, which is made if need be, and its events so far, for `Ledger.restore`.

        A torn tail is cut off. The events are read while they are iterated over: in a thread, and before the first append.
        A segment is followed by another when it has `segment_bytes`; at a checkpoint, what the journal has beyond
        `history_bytes` is compacted. `close_timeout_s` bounds `aclose`.

        Raises JournalBusy, JournalCorrupt or OSError, and while iterating JournalCorrupt. A cancellation leaves it closed.
        """
        sync = durability == "batch"

        def blocking() -> Opened:
            return open_folder(folder, segment_bytes=segment_bytes, sync=sync)

        opened: list[Opened] = []
        with anyio.CancelScope(shield=True):
            opened.append(await anyio.to_thread.run_sync(blocking))
        journal = cls(opened[0].writer, folder, history_bytes, close_timeout_s)
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()
        except anyio.get_cancelled_exc_class():
            await journal.aclose()
            raise
        return journal, JournalReader(opened[0].files).events()

    async def append(self, event: Event) -> None:
        """See `EventLog.append`. Raises JournalFailed."""
        if self._refusal is not None:
            raise _again(self._refusal)
        batch = self._gathering
        batch.add(event)
        if type(event) is CheckpointMarked:
            batch.checkpoint = True
        if batch.size >= FRAME_BYTES:
            self._full.append(batch)
            self._gathering = _Batch()
        if not self._busy:
            self._busy = True
            # Later in this turn of the loop, so that all who are about to append share a frame.
            self._loop.call_soon(self._hand_over)
        if not self._writer.sync and len(self._full) < MAX_FULL:
            await anyio.lowlevel.checkpoint()
            return
        settled = self._loop.create_future()
        batch.waiters.append(settled)
        await settled
        if batch.failure is not None:
            raise _again(batch.failure)

    async def aclose(self) -> None:
        """Write what was appended and let go of the folder. Shielded, and bounded by `close_timeout_s`.

        Raises JournalFailed when that fails or takes too long; not for a failure before, which the appends were told of.
        """
        told = self._refusal
        self._closing = True
        self._refusal = told or JournalFailed(self._folder, "it is closed")
        with anyio.move_on_after(self._close_timeout_s, shield=True):
            if not self._busy:
                self._batches.put(None)
            await self._ended.wait()
            if told is None and self._failure is not None:
                raise _again(self._failure)
            return
        raise JournalFailed(self._writer.path, f"no answer from the disk for {self._close_timeout_s:g} s")

    def _hand_over(self) -> None:
        """Give the thread its next frame, if there is one."""
        if self._full:
            self._batches.put(self._full.popleft())
        elif self._gathering.count:
            self._batches.put(self._gathering)
            self._gathering = _Batch()
        else:
            self._busy = False
            if self._closing:
                self._batches.put(None)

    def _settle(self, batch: _Batch, failure: JournalFailed | None) -> None:
        if failure is None:
            self._tell_waiters(batch, 0)
            return
        self._failure = self._refusal = failure
        lost = (batch, *self._full, self._gathering)
        self._full.clear()
        self._gathering = _Batch()
        for each in lost:
            each.failure = failure
            _wake(each.waiters)
        self._hand_over()

    def _tell_waiters(self, batch: _Batch, told: int) -> None:
        """Wake some of them, and the others in the turns of the loop that follow: it has more to do."""
        if told < len(batch.waiters):
            _wake(batch.waiters[told : told + TOLD_AT_ONCE])
            self._loop.call_soon(self._tell_waiters, batch, told + TOLD_AT_ONCE)
        else:
            # All had their turn, so that what they append next is part of the next frame.
            self._hand_over()

    def _end(self, failure: JournalFailed | None) -> None:
        self._failure = self._failure or failure
        self._ended.set()

    def _work(self) -> None:
        """In the thread."""
        compacting = Thread()
        due = False
        while (batch := self._batches.get()) is not None:
            failure = self._attempt(partial(self._writer.write, batch))
            self._tell(self._settle, batch, failure)
            due = due or (batch.checkpoint and failure is None)
            if due and not compacting.is_alive():
                due = False
                compacting = Thread(
                    target=self._compact, args=(self._writer.number,), name="ledger compaction", daemon=True
                )
                compacting.start()
        if compacting.is_alive():
            compacting.join()
        if due:
            self._compact(self._writer.number)
        self._tell(self._end, self._attempt(self._writer.close))

    def _attempt(self, write: Callable[[], None]) -> JournalFailed | None:
        try:
            write()
        except Exception as e:
            why = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
            failure = JournalFailed(self._writer.path, f"cannot be written: {why}; what was acknowledged is kept")
            failure.__cause__ = e
            return failure
        return None

    def _compact(self, before: int) -> None:
        try:
            path = compact(self._folder, before=before, keep_bytes=self._history_bytes)
        except (OSError, LedgerError) as e:
            # The journal is as good as before, only longer.
            logger.warning("compaction failed: %s", e)
        else:
            if path is not None:
                logger.info("older events were compacted into %s", path)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # The loop is closed: nobody waits.
            self._loop.call_soon_threadsafe(callback, *args)


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for settled in waiters:
        if not settled.done():  # Cancelled.
            settled.set_result(None)


def _again(failure: JournalFailed) -> JournalFailed:
    """A copy: one exception cannot be raised in several tasks without mixing up their tracebacks."""
    copy = JournalFailed(failure.path, failure.why)
    copy.__cause__ = failure.__cause__
    return copy
