"""A generation worker without a process, that answers, fails and freezes as the real one does; and the process behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel

from controller.member import Member
from ledger.records import CallCoords, CallReply, CallRequest, Message, Sampling, WeightSpan
from workers.generation.api import GENERATE, LOAD_WEIGHTS, WeightsLoaded
from workers.generation.engine import EngineStats
from workers.launch import LaunchError
from workers.rpc.errors import Failure, RemoteError, RpcTimeout, WorkerUnreachable


class FakeWorker:
    """The client and, for the fleet monitor, the process. Each process begins with weight version 0."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.starts = 0
        self.startable = True
        self.calls: list[CallRequest] = []
        self.loaded: list[int] = []
        self.on_generate: Callable[[CallRequest], Any] = lambda _: None
        """May raise, or return something to await before the answer."""
        self._begin()

    def _begin(self) -> None:
        self.version = 0
        self.tokens = 0
        self.running = 0
        self.wedged = False
        self.refuses = ""
        self.thawed = anyio.Event()
        self.thawed.set()
        self.gone = anyio.Event()
        self.epitaph = ""
        self.starts += 1

    # The process.

    @property
    def client(self) -> Any:
        return self

    @property
    def alive(self) -> bool:
        return not self.gone.is_set()

    def die(self) -> None:
        self.epitaph = f"worker {self.name} died, signal SIGKILL"
        self.gone.set()

    def freeze(self) -> None:
        self.thawed = anyio.Event()

    async def died(self) -> str:
        await self.gone.wait()
        return self.epitaph

    async def end(self) -> None:
        self.die()

    async def start(self) -> None:
        await anyio.sleep(0.01)
        if not self.startable:
            raise LaunchError(self.name, "died", "exit code 1")
        self._begin()

    # The client.

    async def call(self, method: Any, request: Any, *, timeout: float) -> Any:
        gone = self.gone
        result: list[Any] = []
        with anyio.move_on_after(timeout):
            async with anyio.create_task_group() as tg:

                async def work() -> None:
                    await self.thawed.wait()
                    result.append(await self._answer(method, request))
                    tg.cancel_scope.cancel()

                async def watch() -> None:
                    await gone.wait()
                    tg.cancel_scope.cancel()

                if not gone.is_set():
                    tg.start_soon(watch)
                    tg.start_soon(work)
            if not result:
                raise WorkerUnreachable(f"{self.name}: {method.name}: the connection broke")
            if isinstance(result[0], Exception):
                raise result[0]
            return result[0]
        raise RpcTimeout(f"{self.name}: no reply to {method.name} within {timeout:g} s")

    async def _answer(self, method: Any, request: Any) -> Any:
        try:
            if method is GENERATE:
                return await self._generate(request)
            if method is LOAD_WEIGHTS:
                await anyio.lowlevel.checkpoint()
                if self.wedged:
                    await anyio.sleep_forever()
                if self.refuses:
                    raise failure(self.refuses)
                self.version = request.version
                self.loaded.append(request.version)
                return WeightsLoaded(version=request.version, seconds=0.0)
            return EngineStats(
                running=self.running, waiting=0, kv_usage=0.1, generated_tokens=self.tokens, weight_version=self.version
            )
        except Exception as error:
            return error

    async def _generate(self, request: CallRequest) -> CallReply:
        self.calls.append(request)
        self.running += 1
        try:
            if self.wedged:
                await anyio.sleep_forever()
            waiting = self.on_generate(request)
            if waiting is not None:
                await waiting
            self.tokens += 1
            return reply(request, self.version)
        finally:
            self.running -= 1


def failure(kind: str, failure_class: Any = "infra", *, retryable: bool = False) -> RemoteError:
    return RemoteError(Failure(kind=kind, message="told to", failure_class=failure_class, retryable=retryable))


def call(rollout_id: str = "g.0", seq: int = 0, **more: Any) -> CallRequest:
    return CallRequest(
        rollout_id=rollout_id, call_id=f"{rollout_id}/{seq}", messages=(), sampling=Sampling(max_tokens=4), **more
    )


def reply(request: CallRequest, version: int) -> CallReply:
    coords = CallCoords(
        call_id=request.call_id,
        parent_call_id=None,
        staging_key="",
        prev_len=0,
        carry_len=1,
        delta_len=2,
        weight_spans=(WeightSpan(version, 0, 1),),
        digest="",
        extras_digest="",
        chain_hash="",
        cumulative_hash="",
    )
    return CallReply(
        coords=coords, message=Message(role="assistant"), finish_reason="stop", prompt_tokens=1, completion_tokens=1
    )


def serving(*names: str) -> tuple[list[FakeWorker], list[Member]]:
    workers = [FakeWorker(name) for name in names]
    return workers, [Member.serving(worker) for worker in workers]  # type: ignore[arg-type]
