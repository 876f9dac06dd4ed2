"""What custody costs: durable commits, the digests of a call, the verification of a rollout, and what the loop feels of it.

    python -m benchmarks.ledger [--folder DIR]

The last line is one JSON object. `commits_per_s`: `Ledger.commit` to a journal with `durability: batch` by 256 callers, hash
chain and state machines included. `capture_ms_*`: CPU of `Capture.answer` apart from rendering and generating, for a root
call of so many tokens, and for a call of 256 tokens that continues it. `verify_ms_80k`: CPU of verifying a rollout of 40
calls. `max_lag_ms`: the loop's largest delay in all of that, `idle_max_lag_ms`: with nothing to do. `baseline`: the same
with an fsync for every call, and with digests packed token by token. Each is the best of several rounds, since whatever else
the machine does only adds to it; the lag is the worst of all.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np

from benchmarks.lag import LoopLag
from dataplane.memory import MemoryPlane
from dataplane.schema import STAGING, STAGING_COLUMNS
from dataplane.sink import TokenDelta
from ledger.events import Event, EventLog, MemoryLog, encode
from ledger.journal import Journal
from ledger.ledger import Ledger
from ledger.lineage import fingerprint
from ledger.records import CallCoords, CallReply, CallRequest, Message, Sampling, WeightSpan
from ledger.verify import VerifiedRow, verify
from workers.generation.capture import Capture
from workers.generation.engine import Engine, Generation
from workers.generation.rendering import ChatRenderer

T = TypeVar("T")

CALLERS = 256
COMMITS = 100
"""By each caller, in a round."""
ROUNDS = 9
REPEATS = 11
SAMPLING = Sampling(max_tokens=1024)
USER = Message(role="user", content="What comes next? " * 20)
ANSWER = Message(role="assistant", content="The next line of the answer. " * 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where the journals are written; a temporary folder without it")
    where: Path | None = parser.parse_args().folder
    sys.setswitchinterval(0.001)  # As the controller does.
    with tempfile.TemporaryDirectory(dir=where, prefix="benchmark-ledger-") as folder:
        result = anyio.run(measure, Path(folder), backend_options={"use_uvloop": True})
    print(json.dumps(result), flush=True)


async def measure(folder: Path) -> dict[str, Any]:
    idle, lag = LoopLag(), LoopLag()
    settle_heap()
    async with idle.watched():
        await anyio.sleep(3)
    say(f"idle loop: max lag {idle.max_ms:.2f} ms")
    rounds = [await durable_commits(folder / str(n), lag) for n in range(ROUNDS)]
    commits = max(rounds)
    say(
        f"durable commits: {commits:,.0f} per second, median {statistics.median(rounds):,.0f}; max lag {lag.max_ms:.2f} ms"
    )
    captures = {
        "capture_ms_32k": await capture(32_768, lag),
        "capture_ms_131k": await capture(131_072, lag),
        "capture_ms_131k_plus_256": await capture(131_072, lag, then=256),
    }
    say(f"capture: {', '.join(f'{ms:.2f}' for ms in captures.values())} ms; max lag {lag.max_ms:.2f} ms")
    verified = await verification(lag, calls=40, tokens=2000)
    say(f"verification of 40 calls with 80,000 tokens: {verified:.2f} ms; max lag {lag.max_ms:.2f} ms")
    fsynced = await committing(OneFsyncPerCall(folder / "baseline"), LoopLag(), callers=CALLERS, each=4)
    packed = per_token_packing(32_768)
    say(
        f"baseline: {fsynced:,.0f} commits per second with an fsync each; digests packed token by token {packed:.1f} ms"
    )
    return {
        "commits_per_s": round(commits),
        **{name: round(ms, 3) for name, ms in captures.items()},
        "verify_ms_80k": round(verified, 3),
        "max_lag_ms": round(lag.max_ms, 3),
        "idle_max_lag_ms": round(idle.max_ms, 3),
        "baseline": {
            "commits_per_s_with_one_fsync_per_call": round(fsynced),
            "capture_ms_32k_packed_per_token": round(packed, 3),
        },
    }


async def durable_commits(folder: Path, lag: LoopLag) -> float:
    journal, _ = await Journal.open(folder)
    try:
        return await committing(journal, lag, callers=CALLERS, each=COMMITS)
    finally:
        await journal.aclose()


async def committing(log: EventLog, lag: LoopLag, *, callers: int, each: int) -> float:
    """Commits per second of `callers` rollouts that commit `each` calls, one after the other."""
    ledger = Ledger(log)
    replies = {f"g{n:06d}.0": [reply(f"g{n:06d}.0/{i}") for i in range(each)] for n in range(callers)}

    async def admit(rollout_id: str) -> None:
        group_id = rollout_id.partition(".")[0]
        await ledger.dispatched(group_id, "prompt", [rollout_id], 0)
        await ledger.open(rollout_id, group_id)
        request = fingerprint([USER])
        for _ in range(each):
            await ledger.admit(rollout_id, request)

    async def commit(rollout_id: str) -> None:
        for prepared in replies[rollout_id]:
            await ledger.commit(prepared)

    async def by_all(work: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        async with anyio.create_task_group() as tg:
            for n, rollout_id in enumerate(replies):
                tg.start_soon(work, rollout_id)
                if n % 64 == 63:
                    await anyio.lowlevel.checkpoint()  # They do not all begin in one turn of the loop.

    await by_all(admit)
    settle_heap()
    async with lag.watched():
        begin = time.perf_counter()
        await by_all(commit)
        return callers * each / (time.perf_counter() - begin)


def reply(call_id: str) -> CallReply:
    coords = CallCoords(
        call_id=call_id,
        parent_call_id=None,
        staging_key=f"{call_id}-01234567",
        prev_len=0,
        carry_len=120,
        delta_len=320,
        weight_spans=(WeightSpan(7, 0, 200),),
        digest="01234567" * 8,
        extras_digest="12345678" * 8,
        chain_hash="23456789" * 8,
        cumulative_hash="3456789a" * 8,
    )
    return CallReply(coords=coords, message=ANSWER, finish_reason="stop", prompt_tokens=120, completion_tokens=200)


class OneFsyncPerCall:
    """The usual way to make each call durable: a write and an fsync of its own, in a thread."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._one_at_a_time = anyio.CapacityLimiter(1)

    async def append(self, event: Event) -> None:
        await anyio.to_thread.run_sync(self._write, encode(event), limiter=self._one_at_a_time)

    def _write(self, data: bytes) -> None:
        os.write(self._fd, data)
        os.fsync(self._fd)


class Prepared:
    """Renders and generates at once what was prepared, so that what is left is the capture."""

    max_model_len = 1 << 20
    vocab_size = 150_000
    weight_version = 7

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.generation = sampled(np.random.default_rng(0), 1)

    async def render_root(self, *_: object) -> list[int]:
        return self.prompt

    async def extend(self, *_: object) -> list[int]:
        return self.prompt

    async def parse(self, *_: object, **__: object) -> Message:
        return ANSWER

    async def generate(self, *_: object) -> Generation:
        return self.generation


def sampled(rng: np.random.Generator, n: int) -> Generation:
    return Generation(
        token_ids=rng.integers(0, 150_000, n).tolist(),
        logprobs=(-rng.random(n)).tolist(),
        finish_reason="stop",
        weight_spans=(WeightSpan(7, 0, n),),
    )


class Conversation:
    """A rollout that is captured into memory, with its record."""

    def __init__(self) -> None:
        self.plane = MemoryPlane()
        self.ledger = Ledger(MemoryLog())
        self._prepared = Prepared()
        self._capture = Capture(cast(Engine, self._prepared), cast(ChatRenderer, self._prepared), self.plane)
        self._rng = np.random.default_rng(0)
        self._tokens: list[int] = []
        self._messages: list[Message] = []

    async def begin(self) -> None:
        await self.ledger.dispatched("g0", "prompt", ["g0.0"], 7)
        await self.ledger.open("g0.0", "g0")

    async def call(self, lag: LoopLag, *, prompt: int, generated: int) -> float:
        """One more call; the CPU milliseconds of its capture."""
        self._messages.append(USER)
        admission = await self.ledger.admit("g0.0", fingerprint(self._messages))
        self._prepared.prompt = [*self._tokens, *self._rng.integers(0, 150_000, prompt).tolist()]
        self._prepared.generation = sampled(self._rng, generated)
        request = CallRequest(
            rollout_id="g0.0",
            call_id=admission.call_id,
            messages=tuple(self._messages),
            sampling=SAMPLING,
            parent=admission.parent,
        )
        ms, answer = await cpu_ms(lag, lambda: self._capture.answer(request))
        await self.ledger.commit(answer)
        self._tokens = [*self._prepared.prompt, *self._prepared.generation.token_ids]
        self._messages.append(answer.message)
        return ms


async def capture(tokens: int, lag: LoopLag, *, then: int = 0) -> float:
    """CPU milliseconds to capture a root call of `tokens`, or the call of `then` tokens that continues it."""
    times: list[float] = []
    for _ in range(REPEATS):
        conversation = Conversation()
        await conversation.begin()
        ms = await conversation.call(lag, prompt=tokens - 1024, generated=1024)
        if then:
            ms = await conversation.call(lag, prompt=then // 4, generated=then - then // 4)
        times.append(ms)
    return min(times)


async def verification(lag: LoopLag, *, calls: int, tokens: int) -> float:
    """CPU milliseconds to verify and linearize a rollout of `calls` calls that add `tokens` each, as the finalizer does."""
    conversation = Conversation()
    await conversation.begin()
    for _ in range(calls):
        await conversation.call(lag, prompt=tokens // 4, generated=tokens - tokens // 4)
    receipt = await conversation.ledger.seal("g0.0")
    staged = await conversation.plane.get(STAGING, receipt.staging_keys, STAGING_COLUMNS)
    deltas = [TokenDelta(**{name: row[name] for name in STAGING_COLUMNS}) for row in staged]
    rows = dict(zip(receipt.staging_keys, deltas, strict=True))
    times: list[float] = []
    for _ in range(REPEATS):
        ms, row = await cpu_ms(lag, lambda: anyio.to_thread.run_sync(verify, receipt, rows))
        assert isinstance(row, VerifiedRow), row
        assert row.length == calls * tokens
        times.append(ms)
    return min(times)


async def cpu_ms(lag: LoopLag, work: Callable[[], Awaitable[T]]) -> tuple[float, T]:
    async with lag.watched():
        begin = time.process_time()
        result = await work()
        return (time.process_time() - begin) * 1000, result


def per_token_packing(tokens: int) -> float:
    """CPU milliseconds of a root call's three digests when every number is packed by itself."""
    rng = np.random.default_rng(0)
    ids: list[int] = rng.integers(0, 150_000, tokens).tolist()
    mask, logprobs = [1.0] * tokens, (-rng.random(tokens)).tolist()
    times: list[float] = []
    for _ in range(3):
        begin = time.process_time()
        for columns in ([(">Q", ids)], [(">Q", ids)], [(">Q", ids), (">f", mask), (">f", logprobs)]):
            sha = hashlib.sha256()
            for form, values in columns:
                for value in values:
                    sha.update(struct.pack(form, value))
            sha.hexdigest()
        times.append((time.process_time() - begin) * 1000)
    return min(times)


def settle_heap() -> None:
    """Keep the collector out of the measurement, as the controller does after its start-up."""
    gc.collect()
    gc.freeze()


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
