"""RPC errors. A failure crosses the wire as data (`Failure`), never as a pickled exception.

RpcError
├── RemoteError        the handler failed; carries its `Failure`
├── RpcTimeout         no reply within the deadline; the server was told to cancel
├── WorkerUnreachable  no connection, or it broke before the reply
└── ProtocolError      the bytes are not what the method's types say (or exceed the size limit)
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

FailureClass = Literal["infra", "data", "capture"]


class Failure(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A handler's failure. `failure_class` is decided where the error happens.

    infra: worth retrying elsewhere. data: permanent for this input. capture: custody cannot be proven.
    """

    kind: str
    """A stable word for programs, e.g. "prompt_too_long", or the exception's class name."""
    message: str
    failure_class: FailureClass = "infra"
    retryable: bool = False
    where: str = ""
    """The worker and method it happened in."""


class RpcError(Exception):
    """Base of all RPC errors."""


class RemoteError(RpcError):
    """The handler raised. `failure` says what, and whether a retry can help."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.where}: {failure.kind}: {failure.message}")
        self.failure = failure


class RpcTimeout(RpcError):
    """No reply within the deadline."""


class WorkerUnreachable(RpcError):
    """The worker cannot be reached, or the connection broke before its reply."""


class ProtocolError(RpcError):
    """A message that does not decode as the method's type, or is larger than the limit."""


class HandlerError(Exception):
    """Raised by a handler to say exactly which `Failure` the caller gets. Other exceptions become kind=<class name>."""

    def __init__(
        self, kind: str, message: str, *, failure_class: FailureClass = "infra", retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.failure = Failure(kind=kind, message=message, failure_class=failure_class, retryable=retryable)
