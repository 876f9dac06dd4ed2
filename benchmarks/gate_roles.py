"""The processes of `benchmarks.gate`: engine, gate, FastAPI baseline, and the two load generators."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

ROLLOUTS = 4096
WARM_UP_S = 1.0


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


def answer_with_cpu_time() -> None:
    """To each line on stdin, this process's CPU seconds so far, from a thread that sleeps otherwise."""

    def work() -> None:
        while sys.stdin.readline():
            used = resource.getrusage(resource.RUSAGE_SELF)
            say(used.ru_utime + used.ru_stime)
        os._exit(0)

    threading.Thread(target=work, daemon=True).start()


# The engine.


async def engine(path: str) -> None:
    from benchmarks.constant_tokens import answer
    from ledger.records import CallReply, CallRequest
    from workers.generation.api import GENERATE
    from workers.rpc.server import RpcServer

    async def generate(request: CallRequest) -> CallReply:
        return answer(request)

    server = RpcServer("engine")
    server.register(GENERATE, generate)
    async with anyio.create_task_group() as tasks:
        say(await tasks.start(server.serve, f"unix:{path}", "token"))
        await anyio.sleep_forever()


# The gate, as controller.run builds it.


def ignore(rollout_id: str, start_s: float, end_s: float) -> None:
    """No trace is kept of the calls."""


async def gate(engine_path: str, folder: str) -> None:
    from controller.generation_pool import GenerationPool
    from controller.interpreter import quiet_interpreter
    from controller.member import Member
    from ledger.gate import Gate
    from ledger.http.connections import listen
    from ledger.http.sampling import SamplingRules
    from ledger.http.server import GateServer
    from ledger.journal import Journal
    from ledger.ledger import Ledger
    from ledger.records import Sampling
    from workers.rpc.client import RpcClient

    journal, _ = await Journal.open(Path(folder))
    ledger = Ledger(journal)
    rollouts = [f"g{i:06d}.0" for i in range(ROLLOUTS)]
    await ledger.dispatched("g", "prompt", rollouts, 0)
    async with anyio.create_task_group() as tasks:
        for rollout_id in rollouts:
            tasks.start_soon(ledger.open, rollout_id, "g")
    client = RpcClient(f"unix:{engine_path}", "token", name="engine")
    pool = GenerationPool([Member.serving(client)], call_timeout_s=60, on_call=ignore)
    listener = listen("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    server = GateServer(
        Gate(ledger, pool.generate, max_calls_per_rollout=1_000_000, call_timeout_s=60),
        ledger,
        SamplingRules(Sampling(max_tokens=64), "fixed"),
        url=f"http://127.0.0.1:{port}",
        model="model",
    )
    answer_with_cpu_time()
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve, listener)
        keys = {rollout_id: server.api_key(rollout_id) for rollout_id in rollouts}
        with quiet_interpreter():
            say({"port": port, "keys": keys})
            await anyio.sleep_forever()


# The baseline.


def fastapi() -> None:
    from benchmarks.gate_fastapi import serve

    listener = socket.create_server(("127.0.0.1", 0))
    answer_with_cpu_time()
    say({"port": listener.getsockname()[1], "keys": {f"g{i:06d}.0": "k" * 64 for i in range(ROLLOUTS)}})
    serve(listener)


# The load.


class Connection:
    """One keep-alive connection that speaks as little HTTP as it takes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def call(self, request: bytes) -> None:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        start = lower.index(b"content-length:") + 15
        body = await self._reader.readexactly(int(lower[start : lower.index(b"\r", start)]))
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head!r} {body!r}")


class Requests:
    """Bodies as agents send them, with the headers of the official client: a question, then a second one on its answer."""

    def __init__(self, target: Any) -> None:
        from benchmarks.constant_tokens import ANSWER

        self._answer = ANSWER
        self._keys: list[tuple[str, str]] = list(target["keys"].items())
        self._made = 0

    def next(self) -> tuple[bytes, bytes]:
        n, self._made = self._made, self._made + 1
        rollout_id, key = self._keys[n % len(self._keys)]
        first: list[Any] = [
            {"role": "system", "content": "You are a careful assistant. Answer in one sentence."},
            {"role": "user", "content": f"What is {n} times 7? Explain how you got there."},
        ]
        second = [*first, {"role": "assistant", "content": self._answer}, {"role": "user", "content": "Are you sure?"}]
        return self._post(rollout_id, key, first), self._post(rollout_id, key, second)

    def _post(self, rollout_id: str, key: str, messages: list[Any]) -> bytes:
        body = json.dumps({"messages": messages, "model": "model", "max_tokens": 64}).encode()
        head = (
            f"POST /ng-rollout/{rollout_id}/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            "Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nAccept: application/json\r\n"
            "Content-Type: application/json\r\nUser-Agent: AsyncOpenAI/Python\r\nX-Stainless-Lang: python\r\n"
            f"X-Stainless-Async: async:asyncio\r\nX-Stainless-Retry-Count: 0\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


async def saturate(target: Any, seconds: float, connections: int) -> None:
    """Keep every connection busy; after a warm-up, count the calls of `seconds`."""
    requests, done = Requests(target), 0

    async def agent(connection: Connection) -> None:
        nonlocal done
        while True:
            for request in requests.next():
                await connection.call(request)
                done += 1

    async with anyio.create_task_group() as tasks:
        for _ in range(connections):
            tasks.start_soon(agent, await Connection.open(target["port"]))
        await anyio.sleep(WARM_UP_S)
        say("warm")
        await anyio.to_thread.run_sync(sys.stdin.readline)
        before = done
        await anyio.sleep(seconds)
        say(done - before)
        tasks.cancel_scope.cancel()


async def arrivals(target: Any, seconds: float, rate: float) -> None:
    """Calls at a fixed rate, whether earlier ones are answered or not; then their latencies in ms."""
    requests = Requests(target)
    prepared: list[bytes] = []
    while len(prepared) < (seconds + WARM_UP_S) * rate:
        # The second call of a conversation is due when the first is long answered.
        firsts, seconds_ = zip(*(requests.next() for _ in range(100)), strict=True)
        prepared += (*firsts, *seconds_)
    idle = deque([await Connection.open(target["port"]) for _ in range(32)])
    latencies: list[float] = []

    async def call(request: bytes, due: float) -> None:
        connection = idle.popleft() if idle else await Connection.open(target["port"])
        await connection.call(request)
        latencies.append((time.perf_counter() - due) * 1000)
        idle.append(connection)

    start = time.perf_counter() + 0.1
    async with anyio.create_task_group() as tasks:
        for index, request in enumerate(prepared):
            due = start + index / rate
            await anyio.sleep(max(0.0, due - time.perf_counter()))
            tasks.start_soon(call, request, due)
    say(latencies[int(WARM_UP_S * rate) :])


ROLES: dict[str, Callable[[list[str]], None]] = {
    "engine": lambda a: run(engine, a[0]),
    "gate": lambda a: run(gate, a[0], a[1]),
    "fastapi": lambda a: fastapi(),
    "saturate": lambda a: run(saturate, json.loads(sys.stdin.readline()), float(a[0]), int(a[1])),
    "arrivals": lambda a: run(arrivals, json.loads(sys.stdin.readline()), float(a[0]), float(a[1])),
}


def run(role: Callable[..., Any], *arguments: object) -> None:
    anyio.run(role, *arguments, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    ROLES[sys.argv[1]](sys.argv[2:])
