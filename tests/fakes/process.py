"""A worker process without the process: what is called in it runs beside the caller, in a life that can be frozen, slowed or
ended at any moment, behind the interfaces of `RpcClient` and `ReplaceableWorker`.

As over the real RPC, a handler runs in the worker and not in its caller: a caller that leaves cancels it, but a frozen
worker hears of that only when it goes on; and where a connection broke, the handler may have done its work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from msgspec.structs import replace

from workers.launch import LaunchError, WorkerDied
from workers.rpc import wire
from workers.rpc.errors import (
    Failure,
    HandlerError,
    ProtocolError,
    RemoteError,
    RpcError,
    RpcTimeout,
    WorkerUnreachable,
)
from workers.rpc.method import Method

Handlers = Mapping[str, Callable[[Any], Awaitable[Any]]]


class _Call:
    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.answered = anyio.Event()
        self.reply = b""
        self.error: RpcError | None = None


class Life:
    """One process, from its start to its end."""

    def __init__(self, process: FakeProcess, number: int) -> None:
        self.process = process
        self.number = number
        self.over = anyio.Event()
        self.handlers: Handlers = {}
        self.calls: dict[_Call, None] = {}
        self._left: list[_Call] = []

    async def handle(self, call: _Call, method: Method[Any, Any], body: bytes) -> None:
        where = f"{self.process.name}.{method.name}"
        try:
            with call.scope:
                await self.process.spend(0)
                if method.name in self.process.silent:
                    await anyio.sleep_forever()
                reply = await self.handlers[method.name](wire.decode(method.request, body))
                await self.process.spend(0)
                call.reply = wire.encode(reply)
        except HandlerError as error:
            call.error = RemoteError(replace(error.failure, where=where))
        except AssertionError:
            raise
        except Exception as error:
            call.error = RemoteError(Failure(kind=type(error).__name__, message=str(error), where=where))
        if call.scope.cancelled_caught and call.error is None:
            call.error = WorkerUnreachable(f"{where}: the connection broke")
        self.calls.pop(call, None)
        call.answered.set()

    def leave(self, call: _Call) -> None:
        """Its caller is gone."""
        if self.process.frozen:
            self._left.append(call)
        else:
            call.scope.cancel()

    def thawed(self) -> None:
        for call in self._left:
            call.scope.cancel()
        self._left.clear()

    def end(self) -> None:
        self.over.set()
        for call in tuple(self.calls):
            call.error = WorkerUnreachable(f"{self.process.name}: the connection broke")
            call.answered.set()
            call.scope.cancel()


class FakeProcess:
    """`boot(life)` gives the handlers of a new life. All durations are of the loop's clock.

    It is a `ReplaceableWorker` to the fleet. `start_fails` many starts fail; `latency_s()` is that of a message either way.
    """

    def __init__(
        self,
        name: str,
        tasks: TaskGroup,
        boot: Callable[[Life], Handlers],
        *,
        start_s: float = 2.0,
        latency_s: Callable[[], float] = lambda: 0.001,
    ) -> None:
        self.name = name
        self.tasks = tasks
        self.slowness = 1.0
        self.start_fails = 0
        self.silent: set[str] = set()
        """Methods that are never answered."""
        self.latency_s = latency_s
        self.loses_reply: Callable[[str], bool] = lambda method: False
        """Whether the connection breaks under a reply to `method`."""
        self.spoils_reply: Callable[[str, bytes], bytes] = lambda method, reply: reply
        self.on_pace: Callable[[], None] = lambda: None
        """Hears when it is frozen, thawed or slowed."""
        self.in_flight: Counter[str] = Counter()
        """Calls whose callers wait, by method."""
        self._boot = boot
        self._start_s = start_s
        self._thaw = anyio.Event()
        self._thaw.set()
        self._lives = 0
        self._gone = anyio.Event()
        self._gone.set()
        self.life: Life | None = None

    @property
    def alive(self) -> bool:
        return self.life is not None

    @property
    def frozen(self) -> bool:
        return not self._thaw.is_set()

    @property
    def pid(self) -> int:
        return -1

    @property
    def client(self) -> FakeClient:
        assert self.life is not None
        return FakeClient(self.life)

    def come_up(self) -> None:
        """Start at once, as at the beginning of a run."""
        assert self.life is None
        self._lives += 1
        self._gone = anyio.Event()
        self.life = Life(self, self._lives)
        self.life.handlers = self._boot(self.life)

    async def start(self) -> None:
        """Raises LaunchError."""
        await anyio.sleep(self._start_s)
        if self.start_fails:
            self.start_fails -= 1
            raise LaunchError(self.name, "bad_luck", "it did not start, as it was told")
        self.come_up()

    async def end(self) -> None:
        self.kill()
        await anyio.sleep(0.01)

    async def died(self) -> str:
        await self._gone.wait()
        return f"worker {self.name} died: signal 9"

    async def watch(self) -> NoReturn:
        """As a `WorkerProcess`: raises WorkerDied."""
        await self._gone.wait()
        raise WorkerDied(self.name, -9, log=())

    def kill(self) -> None:
        """As SIGKILL does, frozen or not."""
        if self.life is not None:
            life, self.life = self.life, None
            life.end()
            self.thaw()
            self._gone.set()

    def freeze(self) -> None:
        """As SIGSTOP does. Connections are accepted, and nothing is answered."""
        if self.alive and not self.frozen:
            self._thaw = anyio.Event()
            self.on_pace()

    def thaw(self) -> None:
        if self.frozen:
            self._thaw.set()
            self.on_pace()
            if self.life is not None:
                self.life.thawed()

    def slow(self, factor: float) -> None:
        self.slowness = factor
        self.on_pace()

    async def spend(self, seconds: float) -> None:
        """Let so much of the process's own time pass."""
        if seconds:
            await anyio.sleep(seconds * self.slowness)
        while self.frozen:
            await self._thaw.wait()


class FakeClient:
    """The `RpcClient` of one life."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._process = life.process
        self.name = life.process.name

    async def call(self, method: Method[Any, Any], request: Any, *, timeout: float | None = None) -> Any:
        """See `RpcClient.call`."""
        seconds = method.timeout_s if timeout is None else timeout
        body = wire.encode(request)
        with anyio.move_on_after(seconds):
            self._process.in_flight[method.name] += 1
            try:
                reply = await self._exchange(method, body)
            finally:
                self._process.in_flight[method.name] -= 1
            try:
                return wire.decode(method.reply, reply)
            except ValueError as error:
                raise ProtocolError(f"{self.name}: {method.name}: {error}") from error
        raise RpcTimeout(f"{self.name}: no reply to {method.name} within {seconds:g} s")

    async def _exchange(self, method: Method[Any, Any], body: bytes) -> bytes:
        await anyio.sleep(self._process.latency_s())
        if self._life.over.is_set():
            raise WorkerUnreachable(f"{self.name}: {method.name}: connection refused")
        call = _Call()
        self._life.calls[call] = None
        self._process.tasks.start_soon(self._life.handle, call, method, body)
        try:
            await call.answered.wait()
        except BaseException:
            self._life.leave(call)
            raise
        if call.error is not None:
            raise call.error
        await anyio.sleep(self._process.latency_s())
        if self._process.loses_reply(method.name):
            raise WorkerUnreachable(f"{self.name}: {method.name}: the connection broke")
        return self._process.spoils_reply(method.name, call.reply)

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()
