"""Who takes part in a broadcast: agreed on before each one, through a TCPStore of the trainer. Every wait has a deadline.

A member takes a ticket, is called, says that it is here, and is given its rank. Whoever is silent when called (killed,
frozen) is left out after `_CALL_S`, so that a group is made of members that serve. Members that come within `_GATHER_S` of
the first one share a round; the trainer does not wait longer than that for any of them, nor once all engines are there.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch.distributed
from msgspec import Struct

logger = logging.getLogger(__name__)

T = TypeVar("T")

dist: Any = torch.distributed
"""As Any: torch's type stubs leave out what is used of it here."""
Store = Any

_GATHER_S = 0.5
_CALL_S = 2.0
_CONNECT_S = 10.0
_FOREVER = timedelta(days=3650)
"""For the trainer's own wait for the next ticket, which `close` ends."""


class Ticket(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    version: int | None
    """What the member wants; None closes the door."""


class Place(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A member's part in a round, or why it has none."""

    round: int = 0
    rank: int = 0
    size: int = 0
    """Of the group, the trainer (rank 0) included."""
    bytes: int = 0
    """What is broadcast, in chunks of:"""
    chunk: int = 1
    refused: str = ""


class Door:
    """The trainer's side. `gather`, `refuse` and `admit` are called by one thread, `close` by any."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of `host`. Raises OSError."""
        with socket.create_server((host, 0), backlog=128) as listener:
            port = listener.getsockname()[1]
            self._store = dist.TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=_FOREVER,
                master_listen_fd=listener.detach(),
            )
        key = secrets.token_hex(8)
        self.address = f"{host}:{port}/{key}"
        self._keys = dist.PrefixStore(key, self._store)
        self._next = 1
        self._rounds = 0

    def gather(self, most: int) -> dict[int, Ticket]:
        """Wait for members, and return those that answer when called, by the number of their ticket."""
        tickets: dict[int, Ticket] = {}
        while len(tickets) < most:
            taken = self._take(timedelta(seconds=_GATHER_S) if tickets else _FOREVER)
            if taken is None:
                break
            number, key = taken
            try:
                tickets[number] = _decoded(self._keys, key, Ticket)
            except msgspec.MsgspecError as error:
                logger.warning("ticket %d is none: %s", number, error)
                continue
            if tickets[number].version is None:
                return tickets
        for number in tickets:
            self._keys.set(f"call/{number}", "")
        deadline = time.monotonic() + _CALL_S
        return {number: ticket for number, ticket in tickets.items() if self._is_here(number, deadline)}

    def refuse(self, number: int, why: str) -> None:
        self._keys.set(f"place/{number}", msgspec.msgpack.encode(Place(refused=why)))

    def admit(self, numbers: Sequence[int], *, size: int, chunk: int) -> tuple[Place, Store]:
        """Give the members their ranks; returns the trainer's own place and the store to meet them by."""
        self._rounds += 1
        places = [
            Place(round=self._rounds, rank=rank, size=len(numbers) + 1, bytes=size, chunk=chunk)
            for rank in range(len(numbers) + 1)
        ]
        for number, place in zip(numbers, places[1:], strict=True):
            self._keys.set(f"place/{number}", msgspec.msgpack.encode(place))
        return places[0], _meeting(self._keys, places[0])

    def close(self) -> None:
        """Have `gather` return a ticket of no version."""
        # By a connection of its own: the thread's is busy waiting.
        member = Member(self.address, timeout_s=_CONNECT_S)
        member.take_ticket(None)

    def _take(self, patience: timedelta) -> tuple[int, str] | None:
        """The next ticket's number and key, if it comes in time."""
        key = f"ticket/{self._next}"
        try:
            self._keys.wait([key], patience)
        except dist.DistStoreError:
            return None
        self._next += 1
        return self._next - 1, key

    def _is_here(self, number: int, deadline: float) -> bool:
        left = max(0.01, deadline - time.monotonic())
        try:
            self._keys.wait([f"here/{number}"], timedelta(seconds=left))
        except dist.DistStoreError:
            return False
        return True


class Member:
    """An engine's side, for one attempt to take part."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        """Connect. Raises ValueError for an address that is none, or torch's DistError."""
        where, _, key = address.partition("/")
        host, _, port = where.rpartition(":")
        if not (host and key and port.isdecimal()):
            raise ValueError(f"{address!r} is no address of a gloo broadcast: it looks like host:port/key")
        self._store = dist.TCPStore(
            host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        self._keys = dist.PrefixStore(key, self._store)
        with socket.create_connection((host, int(port)), timeout=timeout_s) as way:
            self.interface: str = way.getsockname()[0]
            """This machine's address on the way to the trainer."""

    def take_ticket(self, version: int | None) -> int:
        number = int(self._keys.add("tickets", 1))
        self._keys.set(f"ticket/{number}", msgspec.msgpack.encode(Ticket(version=version)))
        return number

    def join(self, version: int) -> tuple[Place, Store]:
        """Take part in the next round, if `version` is offered. Raises LookupError if not, DistError when time is up."""
        number = self.take_ticket(version)
        self._keys.wait([f"call/{number}"])
        self._keys.set(f"here/{number}", "")
        place = _decoded(self._keys, f"place/{number}", Place)
        if place.refused:
            raise LookupError(place.refused)
        return place, _meeting(self._keys, place)


def _meeting(keys: Store, place: Place) -> Store:
    return dist.PrefixStore(f"round/{place.round}", keys)


def _decoded(keys: Store, key: str, kind: type[T]) -> T:
    return msgspec.msgpack.decode(keys.get(key), type=kind)
