"""The gate's connections: how many there may be, which has to go, and what becomes of one that speaks no HTTP."""

from __future__ import annotations

import logging
import socket
from asyncio import Transport
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from ledger.http.errors import ApiError, failed
from ledger.http.responses import refusal

BACKLOG = 4096

logger = logging.getLogger(__name__)


class HttpServer(web.Server):
    """Has at most `max_connections` connections."""

    def __init__(self, handler: Callable[[web.BaseRequest], Any], *, max_connections: int, **options: Any) -> None:
        super().__init__(handler, **options)
        self._max_connections = max_connections

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: RequestHandler, transport: Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._connections) > self._max_connections:
            self._make_room(handler)

    def _make_room(self, newest: RequestHandler) -> None:
        """Close the oldest connection on which nothing is asked, rather one that never asked; else the newest of all.

        So whoever hoards connections loses them to those who use theirs.
        """
        live = [connection for connection, transport in self._connections.items() if not transport.is_closing()]
        if len(live) > self._max_connections:
            idle = (c for c in live if isinstance(c, _Connection) and c.idle and c is not newest)
            self._connections[min(idle, key=lambda c: c.asked, default=newest)].abort()


class _Connection(RequestHandler):
    """Answers what is no HTTP as everything else is answered, and does not let it fill the log."""

    __slots__ = ()

    @property
    def idle(self) -> bool:
        return self._current_request is None and not self._messages

    @property
    def asked(self) -> bool:
        return self._request_count > 0

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun; the connection is closed")
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.error("the gate failed at a request from %s", request.remote, exc_info=exc)
            error = failed()
        else:
            logger.debug("no HTTP from %s: %s", request.remote, message)
            text = f"the request is not acceptable HTTP: {message or HTTPStatus(status).phrase}"
            error = ApiError(status, "bad_http", text, retry=False)
        response = refusal(error)
        response.force_close()
        return response


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for `GateServer.serve`; port 0 takes a free one. Raises OSError when the address cannot be had."""
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
    )[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # Only that makes sure of the address; who connects before `serve` waits.
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def cut_off_silent_readers(listener: socket.socket, seconds: float) -> None:
    """Have the kernel break connections whose peer takes no data for so long; accepted sockets inherit it. Linux only."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
