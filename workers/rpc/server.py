"""The worker's side of RPC: a handler runs at most once per request id, and only while a caller waits for it.

Whatever comes over the socket, the server goes on serving: bad bytes and failing handlers end in a `Failure`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import anyio
import msgspec
from aiohttp import web
from anyio.abc import TaskStatus

from workers.rpc import wire
from workers.rpc.calls import Answer, Calls, IdReused
from workers.rpc.errors import Failure, HandlerError
from workers.rpc.method import Method, Reply, Request
from workers.rpc.wire import Health, Status, TcpAddress, UnixAddress

logger = logging.getLogger(__name__)

_BACKLOG = 4096
"""Pending connections: a full backlog refuses a unix-socket connection at once, and a controller opens hundreds."""
_KEEPALIVE_S = 120.0
"""Longer than the client's, so that a connection is not closed under a request on its way."""
_FLUSH_S = 5.0
"""On shutdown: for replies to be taken by callers that read slowly."""
_WORD = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MILLISECONDS = re.compile(r"[0-9]{1,9}")


class _BadMessage(Exception):
    """The request cannot be accepted; the text goes to the caller as a `ProtocolError`."""


@dataclass(frozen=True)
class _Route:
    method: Method[Any, Any]
    handler: Callable[[Any], Awaitable[Any]]


class RpcServer:
    """Serves registered methods on one address."""

    def __init__(self, name: str, *, max_bytes: int = wire.MAX_BYTES) -> None:
        """`name` is the worker's, for failures and health. `max_bytes` bounds a request and a reply."""
        self.name = name
        self._max_bytes = max_bytes
        self._routes: dict[str, _Route] = {}
        self._calls: Calls | None = None
        self._authorization = b""
        self._instance = secrets.token_hex(8)
        self._started = time.monotonic()

    def register(self, method: Method[Request, Reply], handler: Callable[[Request], Awaitable[Reply]]) -> None:
        """Answer `method` with `handler`, before or while serving. Raises ValueError when it is registered already.

        A handler is cancelled when nobody waits for it any more (the caller was cancelled, timed out or died). It says
        what failed with `HandlerError`; any other exception is logged with its traceback and sent as its class name
        and message.
        """
        if method.name in self._routes:
            raise ValueError(f"method {method.name!r} is registered already")
        self._routes[method.name] = _Route(method, handler)

    async def serve(
        self, address: str, token: str, *, task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until cancelled: `await task_group.start(server.serve, address, token)` returns the bound address.

        `address` is "unix:/path" or "tcp:host:port" (port 0 takes a free one). On cancellation the running handlers are
        cancelled and awaited, and their callers get `WorkerUnreachable`. Raises OSError when the address cannot be bound.
        """
        self._authorization = wire.bearer(token).encode()
        http = web.Server(
            self._respond,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            keepalive_timeout=_KEEPALIVE_S,
        )
        runner = web.ServerRunner(http, shutdown_timeout=_FLUSH_S)
        try:
            await runner.setup()
            bound = await _listen(runner, address)
            async with anyio.create_task_group() as tasks:
                self._calls = Calls(tasks)
                task_status.started(str(bound))
                await anyio.sleep_forever()
        finally:
            self._calls = None
            with anyio.CancelScope(shield=True):
                await runner.cleanup()

    async def _respond(self, request: web.BaseRequest) -> web.Response:
        request_id = _word(request.headers.get(wire.REQUEST_ID, ""))
        name = _word(request.path.removeprefix("/rpc/").removeprefix("/"))
        try:
            answer = await self._answer(request, name, request_id)
        except _BadMessage as error:
            answer = self._failure(Status.BAD_MESSAGE, name, "bad_message", str(error))
        headers = {wire.INSTANCE: self._instance, wire.REQUEST_ID: request_id, wire.METHOD: name}
        return web.Response(status=answer.status, body=answer.body, headers=headers)

    async def _answer(self, request: web.BaseRequest, name: str, request_id: str) -> Answer:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, self._authorization):
            return self._failure(Status.UNAUTHORIZED, name, "unauthorized", "the bearer token is missing or wrong")
        if request.headers.get(wire.INSTANCE, self._instance) != self._instance or self._calls is None:
            return self._failure(Status.GONE, name, "stopping", "the server that had the request has stopped")
        if (request.method, request.path) == ("GET", "/health"):
            return Answer(Status.OK, msgspec.json.encode(self._health(self._calls)))
        route = self._routes.get(name)
        if route is None or request.method != "POST" or not request.path.startswith("/rpc/"):
            known = ", ".join(sorted(self._routes))
            raise _BadMessage(f"{request.method} {request.path[:100]!r} is not a method; this worker has: {known}")
        if not request_id:
            raise _BadMessage(f"header {wire.REQUEST_ID} must be 1 to 64 letters, digits, '.', '_' or '-'")
        seconds = _deadline(request)
        with anyio.move_on_after(seconds):
            body = await _read(request, self._max_bytes)
            fingerprint = hashlib.blake2b(body, digest_size=16, key=name.encode()).digest()
            try:
                return await self._calls.run(
                    request_id, fingerprint, self._where(name), partial(self._handle, route, body)
                )
            except IdReused as error:
                raise _BadMessage(str(error)) from error
        return self._failure(Status.DEADLINE, name, "deadline", f"not done within {seconds:g} s")

    async def _handle(self, route: _Route, body: bytes) -> Answer:
        """Decode, run the handler, encode. Raises nothing but a cancellation."""
        name = route.method.name
        try:
            request = wire.decode(route.method.request, body)
        except ValueError as error:
            return self._failure(Status.BAD_MESSAGE, name, "bad_message", f"not a valid request: {error}")
        try:
            reply = await route.handler(request)
            if not isinstance(reply, route.method.reply):
                raise TypeError(f"handler returned {type(reply).__name__}, not {route.method.reply.__name__}")
            encoded = wire.encode(reply)
        except Exception as raised:
            error = sole_error(raised)
            if isinstance(error, HandlerError):
                failure = error.failure
                return Answer.failure(Status.FAILED, msgspec.structs.replace(failure, where=self._where(name)))
            logger.exception("%s failed", self._where(name))
            return self._failure(Status.FAILED, name, type(error).__name__, str(error))
        if len(encoded) > self._max_bytes:
            text = f"the reply has {len(encoded)} bytes; at most {self._max_bytes} are allowed"
            return self._failure(Status.BAD_MESSAGE, name, "bad_message", text)
        return Answer(Status.OK, encoded)

    def _health(self, calls: Calls) -> Health:
        uptime_s = time.monotonic() - self._started
        return Health(name=self.name, pid=os.getpid(), uptime_s=uptime_s, in_flight=calls.in_flight)

    def _failure(self, status: Status, name: str, kind: str, message: str) -> Answer:
        return Answer.failure(status, Failure(kind=kind, message=message, where=self._where(name)))

    def _where(self, name: str) -> str:
        return f"{self.name}.{name}"


def _word(text: str) -> str:
    """`text` if it is safe to echo in a header, else nothing."""
    return text if _WORD.fullmatch(text) else ""


def _deadline(request: web.BaseRequest) -> float:
    """The request's deadline, in seconds from now."""
    text = request.headers.get(wire.DEADLINE_MS, "")
    if not _MILLISECONDS.fullmatch(text):
        raise _BadMessage(f"header {wire.DEADLINE_MS} is {text[:100]!r}, not whole milliseconds of at most 9 digits")
    return int(text) / 1000


async def _read(request: web.BaseRequest, limit: int) -> bytes:
    parts: list[bytes] = []
    size = request.content_length or 0
    if size <= limit:
        size = 0
        async for part in request.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > limit:
                break
        else:
            return b"".join(parts)
    raise _BadMessage(f"the request has {size} bytes or more; at most {limit} are allowed")


def sole_error(error: Exception) -> Exception:
    """The one error inside a group of one, which is how a task group raises it; else `error` itself."""
    if not isinstance(error, ExceptionGroup):
        return error
    group = cast("ExceptionGroup[Exception]", error)
    return sole_error(group.exceptions[0]) if len(group.exceptions) == 1 else group


async def _listen(runner: web.ServerRunner, address: str) -> UnixAddress | TcpAddress:
    parsed = wire.parse_address(address)
    if isinstance(parsed, UnixAddress):
        await web.UnixSite(runner, parsed.path, backlog=_BACKLOG).start()
        return parsed
    await web.TCPSite(runner, parsed.host, parsed.port, backlog=_BACKLOG).start()
    return TcpAddress(parsed.host, runner.addresses[0][1])
