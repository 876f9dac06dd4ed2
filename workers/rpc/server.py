"""The worker's side of RPC: a handler runs at most once per request id, and only while a caller waits for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskStatus

from workers.rpc.method import Method, Reply, Request
from workers.rpc.wire import MAX_BYTES


class RpcServer:
    """Serves registered methods on one address."""

    def __init__(self, name: str, *, max_bytes: int = MAX_BYTES) -> None:
        """`name` is the worker's, for failures and health. `max_bytes` bounds a request and a reply."""
        raise NotImplementedError

    def register(self, method: Method[Request, Reply], handler: Callable[[Request], Awaitable[Reply]]) -> None:
        """Answer `method` with `handler`, before or while serving. Raises ValueError when it is registered already.

        A handler is cancelled when nobody waits for it any more (the caller was cancelled, timed out or died). It says
        what failed with `HandlerError`; any other exception is logged with its traceback and sent as its class name
        and message.
        """
        raise NotImplementedError

    async def serve(
        self, address: str, token: str, *, task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until cancelled: `await task_group.start(server.serve, address, token)` returns the bound address.

        `address` is "unix:/path" or "tcp:host:port" (port 0 takes a free one). On cancellation the running handlers are
        cancelled and awaited, and their callers get `WorkerUnreachable`. Raises OSError when the address cannot be bound.
        """
        raise NotImplementedError
