"""What can be called on a worker: a name, a typed request, a typed reply, and a default deadline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec import Struct

Request = TypeVar("Request", bound=Struct)
Reply = TypeVar("Reply", bound=Struct)


class Empty(Struct, frozen=True, forbid_unknown_fields=True):
    """A request or reply without content."""


@dataclass(frozen=True)
class Method(Generic[Request, Reply]):
    """One RPC method. `timeout_s` is the deadline used when a call gives none."""

    name: str
    request: type[Request]
    reply: type[Reply]
    timeout_s: float
