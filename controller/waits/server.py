"""The status server: GET /health, /debug/waits and /debug/stacks on loopback, answered by a thread outside of the loop.

So it answers while the event loop is blocked, and then says at what.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
from msgspec import Struct

from controller.sentinel.sentinel import Sentinel
from controller.waits.graph import WaitGraph

STATUS_FILE = "status.json"
WAITS = "/debug/waits"
STACKS = "/debug/stacks"
HEALTH = "/health"

_HOST = "127.0.0.1"
_LOOP_S = 1.0
"""For the loop to take the graph; after that it is taken beside it."""
_REQUEST_S = 5.0


class Health(Struct, frozen=True, kw_only=True):
    status: str
    """`ok`, or `blocked` when the event loop does not answer."""
    doing: str
    loop_silent_seconds: float


class StatusAddress(Struct, frozen=True, kw_only=True):
    """What `status.json` in the run's folder holds while the run lasts."""

    url: str
    pid: int


class StatusServer:
    """`graph` is called in the loop of `sentinel`, or in a thread when that is blocked."""

    def __init__(self, sentinel: Sentinel, graph: Callable[[], WaitGraph]) -> None:
        self._sentinel = sentinel
        self._graph = graph
        self._loop = asyncio.get_running_loop()
        server = self
        handler = type("Handler", (_Handler,), {"status": server})
        self._http = ThreadingHTTPServer((_HOST, 0), handler, bind_and_activate=False)
        self._http.daemon_threads = True

    @contextmanager
    def serving(self) -> Generator[str]:
        """Serve inside; gives the URL. Raises OSError when no port can be had."""
        with self._http:
            self._http.server_bind()
            self._http.server_activate()
            thread = Thread(target=self._http.serve_forever, args=(0.05,), name="status server", daemon=True)
            thread.start()
            try:
                yield f"http://{_HOST}:{self._http.server_port}"
            finally:
                self._http.shutdown()
                thread.join(_REQUEST_S)

    def waits(self) -> WaitGraph:
        """From a thread that is not the loop's."""
        taken: Future[WaitGraph] = Future()

        def take() -> None:
            if taken.set_running_or_notify_cancel():
                try:
                    taken.set_result(self._graph())
                except Exception as error:
                    taken.set_exception(error)

        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(take)
        try:
            return taken.result(_LOOP_S)
        except TimeoutError:
            taken.cancel()
            return self._graph()

    def health(self) -> Health:
        silent = self._sentinel.silent_s
        return Health(
            status="ok" if silent < _LOOP_S else "blocked",
            doing=self._graph().doing,
            loop_silent_seconds=silent,
        )

    def stacks(self) -> str:
        return self._sentinel.dump()


class _Handler(BaseHTTPRequestHandler):
    status: StatusServer
    timeout = _REQUEST_S
    server_version = "monoloop"
    sys_version = ""

    def do_GET(self) -> None:
        if not self._is_local():
            self._answer(403, "text/plain", b"this server answers requests to a loopback address only\n")
            return
        match self.path.partition("?")[0]:
            case "/debug/waits":
                self._answer(200, "application/json", msgspec.json.encode(self.status.waits()))
            case "/health":
                self._answer(200, "application/json", msgspec.json.encode(self.status.health()))
            case "/debug/stacks":
                self._answer(200, "text/plain; charset=utf-8", self.status.stacks().encode())
            case _:
                self._answer(404, "text/plain", f"there are {HEALTH}, {WAITS} and {STACKS}\n".encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Nothing: stderr is the display's."""

    def _is_local(self) -> bool:
        """Whether the request names this server as a loopback address: a web page cannot make a browser do that."""
        host = self.headers.get("Host", "").rpartition(":")[0]
        return host in (_HOST, "localhost", "[::1]")

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def status_file(run_dir: Path, url: str) -> Generator[None]:
    """Keep `status.json` while inside. Blocking."""
    path = run_dir / STATUS_FILE
    unfinished = path.with_name(f"{STATUS_FILE}.{os.getpid()}")
    unfinished.write_bytes(msgspec.json.encode(StatusAddress(url=url, pid=os.getpid())) + b"\n")
    unfinished.rename(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
