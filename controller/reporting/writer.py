"""One writer for all report files: producers never wait, each file's records keep their order, a failed write ends the run.

Records gather for a moment and are then written in one go, in a thread. Leaving `running()` writes what is left,
within a bound and out of reach of cancellation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import Enum, auto
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from anyio import CancelScope, Event, current_time, move_on_after

from controller.reporting.background import background
from controller.reporting.daemon import DaemonThread

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Sink(Protocol[T_contra]):
    """A file as the writer's thread sees it. Its methods may block, never run at the same time, and raise `OSError`."""

    path: Path

    def open(self) -> None: ...

    def write(self, records: Sequence[T_contra], /) -> None: ...

    def close(self) -> None:
        """Also called when `open` failed or was never reached."""
        ...


class WriteFailed(Exception):
    """Report records could not be written, and are lost. `path` is the file, `lost` the number of records."""

    def __init__(self, path: Path, lost: int, why: object) -> None:
        super().__init__(f"cannot write {path}: {why}; {lost} record(s) lost")
        self.path = path
        self.lost = lost


class Channel(Generic[T]):
    """The way to one file. For the loop's thread only."""

    def __init__(self, sink: Sink[T], admit: Callable[[Channel[T]], bool]) -> None:
        self.sink = sink
        self._admit = admit
        self._records: list[T] = []

    def put(self, record: T) -> None:
        """Never waits. Raises `WriteFailed` when the disk is hopelessly behind. After a failed write, which has already
        ended the run, records are discarded."""
        if self._admit(self):
            self._records.append(record)

    def take(self) -> list[T]:
        records, self._records = self._records, []
        return records


class _State(Enum):
    OPEN = auto()
    CLOSING = auto()
    FAILED = auto()
    CLOSED = auto()


class ReportWriter:
    """`linger_s`: how long records gather before a write. `close_timeout_s`: bound on the last write and on closing.
    `max_pending`: records that may wait for a slow disk before that is an error."""

    def __init__(self, *, linger_s: float = 0.25, close_timeout_s: float = 10.0, max_pending: int = 100_000) -> None:
        self._linger_s = linger_s
        self._close_timeout_s = close_timeout_s
        self._max_pending = max_pending
        self._state = _State.OPEN
        self._failure: WriteFailed | None = None
        self._channels: list[Channel[Any]] = []
        self._dirty: dict[Channel[Any], None] = {}
        self._unwritten = 0
        self._flushes: list[Event] = []
        self._wake = Event()
        self._urgent = Event()
        self._scope = CancelScope()
        self._at = Path()
        self._thread = DaemonThread("report writer")

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[ReportWriter]:
        """The body may open channels and put records. A failed write cancels the body and is raised as `WriteFailed`."""
        async with background(self._run, self._stop):
            yield self

    async def open(self, sink: Sink[T]) -> Channel[T]:
        """Opens the sink's file. Raises `WriteFailed`. A cancelled open leaves a file that is closed with the writer."""
        channel = Channel(sink, self._admit)
        self._channels.append(channel)
        try:
            await self._thread.call(sink.open)
        except OSError as error:
            raise WriteFailed(sink.path, 0, error) from error
        return channel

    async def flush(self) -> None:
        """Returns once every record put so far is in its file. Raises `WriteFailed`."""
        if self._state is _State.OPEN:
            written = Event()
            self._flushes.append(written)
            self._wake.set()
            self._urgent.set()
            await written.wait()
        if self._failure is not None:
            raise self._failure

    def _admit(self, channel: Channel[Any]) -> bool:
        if self._state is _State.FAILED:
            return False
        if self._state is not _State.OPEN:
            raise RuntimeError(f"a record for {channel.sink.path} came after the report writer was closed")
        if self._unwritten >= self._max_pending:
            raise WriteFailed(channel.sink.path, self._unwritten, "the disk does not keep up")
        self._unwritten += 1
        self._dirty[channel] = None
        self._wake.set()
        return True

    def _stop(self) -> None:
        if self._state is _State.OPEN:
            self._state = _State.CLOSING
            self._scope.deadline = current_time() + self._close_timeout_s
            self._wake.set()
            self._urgent.set()

    async def _run(self) -> None:
        try:
            with self._scope:
                while self._dirty or self._state is _State.OPEN:
                    await self._wake.wait()
                    self._wake = Event()
                    with move_on_after(self._linger_s):
                        await self._urgent.wait()
                    if self._state is _State.OPEN:
                        self._urgent = Event()
                    await self._write_pending()
            if self._scope.cancelled_caught:
                raise self._too_slow()
        except WriteFailed as failure:
            self._state = _State.FAILED
            self._failure = failure
            raise
        finally:
            for written in self._flushes:
                written.set()
            await self._close_sinks()

    async def _write_pending(self) -> None:
        flushes, self._flushes = self._flushes, []
        batch = [(channel.sink, channel.take()) for channel in self._dirty]
        self._dirty.clear()
        try:
            if batch:
                await self._thread.call(lambda: self._write(batch))
        finally:
            for written in flushes:
                written.set()
        self._unwritten -= sum(len(records) for _, records in batch)

    async def _close_sinks(self) -> None:
        with move_on_after(self._close_timeout_s) as scope:
            for channel in self._channels:
                self._at = channel.sink.path
                try:
                    await self._thread.call(channel.sink.close)
                except OSError as error:
                    if self._failure is None:
                        self._failure = WriteFailed(channel.sink.path, 0, error)
        self._thread.close()
        if self._state is _State.FAILED:
            return
        if scope.cancelled_caught:
            self._failure = self._too_slow()
        self._state = _State.CLOSED if self._failure is None else _State.FAILED
        if self._failure is not None:
            raise self._failure

    def _too_slow(self) -> WriteFailed:
        return WriteFailed(self._at, self._unwritten, f"no answer from the disk for {self._close_timeout_s:g} s")

    def _write(self, batch: Sequence[tuple[Sink[Any], Sequence[Any]]]) -> None:
        """In the thread."""
        for index, (sink, records) in enumerate(batch):
            self._at = sink.path
            try:
                sink.write(records)
            except OSError as error:
                raise WriteFailed(sink.path, sum(len(rest) for _, rest in batch[index:]), error) from error
