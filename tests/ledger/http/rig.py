"""The gate over HTTP on a real socket, with a worker that blocks, fails and answers as it is told, and clients for it."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
from msgspec.structs import replace
from openai import AsyncOpenAI, OpenAI
from yarl import URL

from ledger.events import CallAdmitted, CallCommitted, CallFailed, EventLog, MemoryLog
from ledger.gate import Gate
from ledger.http.connections import listen
from ledger.http.sampling import SamplingMode, SamplingRules
from ledger.http.server import GateServer, Limits
from ledger.ledger import Ledger
from ledger.records import CallReply, CallRequest, Message, Sampling, TokenLogprob
from tests.ledger.worker import Worker, user

ROLLOUT = "g0.0"
RUN = Sampling(max_tokens=64, temperature=0.8, top_p=0.9, top_k=20, stop_token_ids=(7,))
HANG_GUARD_S = 60.0
QUESTION: Any = [{"role": "user", "content": "hi"}]


class HttpWorker(Worker):
    """`requests` are those that came, `running` how many are being worked on."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[CallRequest] = []
        self.running = 0
        self.before: Callable[[], Any] | None = None
        """Awaited before each answer, to block or to fail there."""
        self.message: Message | None = None
        """What the next answers say instead."""

    async def generate(self, request: CallRequest) -> CallReply:
        self.requests.append(request)
        self.running += 1
        try:
            if self.before is not None:
                await self.before()
            await anyio.lowlevel.checkpoint()
            if request.prompt is not None:
                request = replace(request, messages=(user(str(request.prompt)),))
            reply = await super().generate(request)
            await anyio.lowlevel.checkpoint()
        finally:
            self.running -= 1
        if request.logprobs:
            tokens = tuple(TokenLogprob(f"t{i}", -0.25) for i in range(reply.completion_tokens))
            reply = replace(reply, logprobs=tokens)
        return reply if self.message is None else replace(reply, message=self.message)


class HttpRig:
    def __init__(
        self,
        *,
        log: EventLog | None = None,
        mode: SamplingMode = "fixed",
        limits: Limits | None = None,
        max_calls: int = 1000,
        call_timeout_s: float = 20.0,
    ) -> None:
        self.log = log or MemoryLog()
        self.worker = HttpWorker()
        self.ledger = Ledger(self.log)
        gate = Gate(
            self.ledger,
            lambda request: self.worker.generate(request),
            max_calls_per_rollout=max_calls,
            call_timeout_s=call_timeout_s,
        )
        self._listener = listen("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = GateServer(gate, self.ledger, SamplingRules(RUN, mode), url=self.url, model="tiny", limits=limits)

    @asynccontextmanager
    async def running(self, *rollout_ids: str) -> AsyncIterator[HttpRig]:
        await self.open(*rollout_ids or (ROLLOUT,))
        with anyio.fail_after(HANG_GUARD_S):
            async with anyio.create_task_group() as tasks, aiohttp.ClientSession() as self.http:
                await tasks.start(self.server.serve, self._listener)
                yield self
                tasks.cancel_scope.cancel()

    async def open(self, *rollout_ids: str, group_id: str = "g0") -> None:
        await self.ledger.dispatched(group_id, "prompt", rollout_ids, 0)
        for rollout_id in rollout_ids:
            await self.ledger.open(rollout_id, group_id)

    def client(self, rollout_id: str = ROLLOUT, **options: Any) -> AsyncOpenAI:
        """The official client as an agent makes it."""
        return AsyncOpenAI(
            base_url=self.server.base_url(rollout_id), api_key=self.server.api_key(rollout_id), **options
        )

    def blocking_client(self, rollout_id: str = ROLLOUT) -> OpenAI:
        return OpenAI(base_url=self.server.base_url(rollout_id), api_key=self.server.api_key(rollout_id))

    async def post(
        self,
        path: str = "chat/completions",
        body: Any = None,
        *,
        rollout_id: str = ROLLOUT,
        key: str | None = "",
        **headers: str,
    ) -> tuple[int, Any]:
        """Status and decoded body of a plain POST. `key` "" is the rollout's own, None is none."""
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            headers["Authorization"] = f"Bearer {key or self.server.api_key(rollout_id)}"
        data = body if isinstance(body, bytes) else json.dumps({"messages": QUESTION} if body is None else body)
        url = URL(f"{self.url}/ng-rollout/{rollout_id}/v1/{path}", encoded=True)
        async with self.http.post(url, data=data, headers=headers) as response:
            return response.status, json.loads(await response.read())

    async def control(self, method: str, path: str, body: Any = None, token: str | None = "") -> tuple[int, Any]:
        headers = {} if token is None else {"Authorization": f"Bearer {token or self.server.control_token}"}
        url = f"{self.url}/control/rollouts{path}"
        async with self.http.request(method, url, json=body, headers=headers) as response:
            return response.status, json.loads(await response.read())

    async def connect(self) -> tuple[anyio.abc.SocketStream, socket.socket]:
        stream = await anyio.connect_tcp("127.0.0.1", self.port)
        return stream, stream.extra(anyio.abc.SocketAttribute.raw_socket)

    def request(self, body: Any = None, *, rollout_id: str = ROLLOUT, path: str = "chat/completions") -> bytes:
        """The bytes of a POST, for tests that break it off."""
        data = json.dumps({"messages": QUESTION} if body is None else body).encode()
        head = (
            f"POST /ng-rollout/{rollout_id}/v1/{path} HTTP/1.1\r\nHost: gate\r\n"
            f"Authorization: Bearer {self.server.api_key(rollout_id)}\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    async def idle(self) -> None:
        """Wait until no request is being answered and nothing runs in the engine."""
        while self.server.in_flight or self.worker.running:
            await anyio.sleep(0.005)

    def unsettled(self) -> set[str]:
        """Calls that were admitted and have no outcome."""
        assert isinstance(self.log, MemoryLog)
        calls = {e.call_id for e in self.log.events if isinstance(e, CallAdmitted)}
        committed = {e.coords.call_id for e in self.log.events if isinstance(e, CallCommitted)}
        return calls - committed - {e.call_id for e in self.log.events if isinstance(e, CallFailed)}

    def failures(self) -> list[CallFailed]:
        assert isinstance(self.log, MemoryLog)
        return [e for e in self.log.events if isinstance(e, CallFailed)]

    def commits(self) -> list[CallCommitted]:
        assert isinstance(self.log, MemoryLog)
        return [e for e in self.log.events if isinstance(e, CallCommitted)]
