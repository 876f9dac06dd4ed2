"""The worker process's side of its launch: `run_worker` is what `python -m <worker module>` calls.

@asynccontextmanager
async def serve(spec: GenerationSpec, server: RpcServer) -> AsyncIterator[None]:
    service = await GenerationService.create(spec)  # blocking work in a thread
    server.register(GENERATE, service.generate)
    try:
        yield  # the server listens now
    finally:
        await service.aclose()

def main() -> None:
    run_worker(GenerationSpec, serve)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import NoReturn, TypeVar

from msgspec import Struct

from workers.rpc.server import RpcServer

Spec = TypeVar("Spec", bound=Struct)


class StartupError(Exception):
    """Raised by `serve` before it yields: the launcher shows message and remedy, without a traceback."""

    def __init__(self, kind: str, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.remedy = remedy


def run_worker(
    spec_type: type[Spec], serve: Callable[[Spec, RpcServer], AbstractAsyncContextManager[None]]
) -> NoReturn:
    """Serve until the launcher says stop (SIGTERM) or is gone, then exit the process.

    `serve(spec, server)` is entered on the event loop; it registers its handlers and yields; the process then listens
    and reports ready. On a stop the running handlers are cancelled first, then `serve` is left normally (no exception is
    thrown at its yield). A stop before the yield cancels `serve`. When what runs inside `serve` fails, the
    traceback goes to stderr and the process exits with 1.
    """
    raise NotImplementedError
