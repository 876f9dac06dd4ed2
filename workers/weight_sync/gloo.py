"""Weights broadcast by gloo: the trainer's file, byte by byte, into a file in each engine's memory.

A group is made for each broadcast, of the members that answer (`workers.weight_sync.rounds`). When one dies or freezes in
the middle, the broadcast fails for all of them, at the latest after a quarter of their time, and those that live take part
in the next one. Meant for a private network: who can reach the trainer's port and knows the address can have the weights.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from workers.weight_sync.file import FileTransport
from workers.weight_sync.rounds import Door, Member, Place, Store, dist
from workers.weight_sync.spec import WeightSyncSpec

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 20
_CLOSE_S = 5.0


@dataclass(frozen=True)
class _Offer:
    version: int
    path: Path


class GlooTransport:
    """The address is `host:port/key`, the same for all versions. Only the last published version can be received."""

    def __init__(self, spec: WeightSyncSpec, *, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._spec = spec
        self._chunk_bytes = chunk_bytes
        self._patience_s = spec.timeout_s / 4
        self._files = FileTransport(spec)
        self._offer: _Offer | None = None
        self._door: Door | None = None
        self._thread = threading.Thread(target=self._serve, name="gloo-broadcast", daemon=True)

    # The trainer's half.

    def publish(self, weights: Mapping[str, Tensor], version: int) -> str:
        """See `WeightPublisher.publish`. The weights are also kept as a file, in the trainer's folder."""
        self._offer = _Offer(version, Path(self._files.publish(weights, version)))
        if self._door is None:
            self._door = Door(self._spec.host)
            self._thread.start()
        return self._door.address

    def close(self) -> None:
        if self._door is not None:
            with suppress(dist.DistError, OSError):  # then the thread ends with the process
                self._door.close()
                self._thread.join(_CLOSE_S)
        self._files.close()

    def _serve(self) -> None:
        """Broadcast to whoever comes, round by round."""
        assert self._door is not None
        while True:
            tickets = self._door.gather(self._spec.engines)
            offer = self._offer
            assert offer is not None
            admitted: list[int] = []
            for number, ticket in tickets.items():
                if ticket.version is None:
                    return
                if ticket.version == offer.version:
                    admitted.append(number)
                else:
                    self._door.refuse(number, f"weight version {ticket.version} is not offered, {offer.version} is")
            if admitted:
                try:
                    self._send(offer, admitted)
                except (RuntimeError, OSError) as error:
                    logger.warning(
                        "the broadcast of version %d to %d engines failed: %s", offer.version, len(admitted), str(error)
                    )

    def _send(self, offer: _Offer, members: list[int]) -> None:
        assert self._door is not None
        with offer.path.open("rb") as file, _mapped(file.fileno(), write=False) as content:
            place, store = self._door.admit(members, size=content.numel(), chunk=self._chunk_bytes)
            broadcast(content, place, store, interface=self._spec.host, patience_s=self._patience_s)

    # An engine's half.

    @contextmanager
    def receive(self, address: str, version: int, *, timeout_s: float) -> Generator[Path]:
        """See `WeightTransport.receive`. Raises LookupError when the version is not offered, ValueError for an address that
        is none, TimeoutError otherwise, saying what happened last."""
        deadline = time.monotonic() + timeout_s
        file = os.memfd_create(f"weights-v{version}")
        try:
            last: Exception | None = None
            while (left := deadline - time.monotonic()) > 0:
                try:
                    self._receive(address, version, file, left)
                    break
                except (RuntimeError, OSError) as error:
                    last = error
                    logger.warning("receiving weight version %d failed: %s", version, str(error))
            else:
                raise TimeoutError(f"weight version {version} did not arrive within {timeout_s:g} s: {last}") from last
            yield Path(f"/proc/{os.getpid()}/fd/{file}")
        finally:
            os.close(file)

    def _receive(self, address: str, version: int, file: int, left: float) -> None:
        member = Member(address, timeout_s=left)
        place, store = member.join(version)
        os.ftruncate(file, place.bytes)
        with _mapped(file, write=True) as content:
            broadcast(content, place, store, interface=member.interface, patience_s=min(left, self._patience_s))


def broadcast(
    content: Tensor,
    place: Place,
    store: Store,
    *,
    interface: str,
    patience_s: float,
) -> None:
    """Send `content` (uint8, 1-D), or receive it where `place` is not the sender's. Raises RuntimeError when a member fails,
    or is not heard of for `patience_s`: while the group is made, and in each chunk."""
    store.set_timeout(timedelta(seconds=patience_s))
    options: Any = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=patience_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=interface)]
    group: Any = dist.ProcessGroupGloo(store, place.rank, place.size, options)
    try:
        for chunk in cast("tuple[Tensor, ...]", content.split(place.chunk)):
            group.broadcast(chunk, 0).wait()
    finally:
        # At once, though a traceback may keep this frame: the others wait for a member until its connections are closed.
        del group


@contextmanager
def _mapped(file: int, *, write: bool) -> Generator[Tensor]:
    """The file's bytes, uint8, as a tensor of the file's own memory; not to be used after the scope."""
    access = mmap.ACCESS_WRITE if write else mmap.ACCESS_COPY
    content = mmap.mmap(file, 0, access=access)
    yield torch.frombuffer(content, dtype=torch.uint8)
