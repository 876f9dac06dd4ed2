"""The caller's side of RPC: every call ends, within its deadline, in a reply or in one `RpcError`."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from workers.rpc.method import Method, Reply, Request
from workers.rpc.wire import MAX_BYTES, Health


class RpcClient:
    """Calls one worker. Usable from one event loop; any number of calls may be in flight."""

    def __init__(self, address: str, token: str, *, name: str, max_bytes: int = MAX_BYTES) -> None:
        """`address` is "unix:/path" or "tcp:host:port"; `name` is how errors call the worker.

        Nothing connects before the first call. `max_bytes` bounds a request and a reply.
        """
        raise NotImplementedError

    async def call(self, method: Method[Request, Reply], request: Request, *, timeout: float | None = None) -> Reply:
        """Run `method` on the worker. `timeout` in seconds; None takes the method's own.

        The handler runs at most once, however often the request is sent. Raises `RemoteError` (the handler failed),
        `RpcTimeout`, `WorkerUnreachable` or `ProtocolError`. Cancelling the caller, like the deadline, cancels the
        handler.
        """
        raise NotImplementedError

    async def health(self, *, timeout: float = 5.0) -> Health:
        """What the worker's process says of itself. Raises like `call`."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close all connections; calls in flight end with `WorkerUnreachable`. Idempotent."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()
