"""What custody costs end to end: generated tokens/s through gate, capture, ledger and data plane, against vLLM alone.

    python -m benchmarks.end_to_end [--smollm2 models/smollm2] [--calls 128] [--concurrency 64] [--rounds 3]

Every call is a rollout of its own with one chat call: recorded on disk, rendered and sampled by a generation worker, its
tokens staged in TransferQueue, its answer parsed. The bare engine is AsyncLLM in another process, given the same rendered
prompts and told to generate just as many tokens for each. The two take turns; the best round of each counts, since other
load only adds.

The last line is JSON. `ratio_*`: tokens/s through all of it over the bare engine's, with SmolLM2-135M-Instruct (made by
examples/prepare_smollm2.py; null without it), and with a model so small that two cores carry everything else.
`cpu_us_per_call` and `cpu_us_per_token`: processor time of all processes but the engine's (AsyncLLM's own work in the worker
is the engine's), from rounds of two lengths. `tokens_per_s_*`: as measured, with the torch engine beside vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import anyio

from benchmarks.bare_vllm import RUN, Load
from controller.generation_pool import GenerationPool
from controller.member import Member
from dataplane.schema import STAGING
from dataplane.servers import start_servers
from dataplane.spec import connect
from ledger.gate import Gate
from ledger.journal import Journal
from ledger.ledger import Ledger
from ledger.records import CallReply, Message, Sampling
from tests.models import tiny_model
from workers.generation.api import EngineSpec, GenerationSpec
from workers.generation.rendering import ChatRenderer
from workers.launch import launch
from workers.rpc.client import RpcClient

TICK = os.sysconf("SC_CLK_TCK")


class Round(NamedTuple):
    tokens: int
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Through:
    """Everything but a controller's own loop: the processes of a run, and a gate before them."""

    def __init__(self, gate: Gate, ledger: Ledger, plane: Any, worker: int) -> None:
        self._gate = gate
        self._ledger = ledger
        self._plane = plane
        self._worker = worker
        self._rounds = 0

    async def round(self, conversations: list[tuple[Message, ...]], sampling: Sampling, concurrency: int) -> Any:
        """Play them all; returns the round and the replies."""
        self._rounds += 1
        group = f"g{self._rounds}"
        rollouts = [f"{group}.{n}" for n in range(len(conversations))]
        replies: dict[str, CallReply] = {}
        places = anyio.Semaphore(concurrency)

        async def play(rollout: str, messages: tuple[Message, ...]) -> None:
            async with places:
                await self._ledger.open(rollout, group)
                replies[rollout] = await self._gate.chat(rollout, messages, sampling=sampling)

        await self._ledger.dispatched(group, "prompt", rollouts, 0)
        cpu, start = self._cpu_s(), time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for rollout, messages in zip(rollouts, conversations, strict=True):
                tasks.start_soon(play, rollout, messages)
        seconds, cpu = time.perf_counter() - start, self._cpu_s() - cpu
        for rollout in rollouts:
            await self._ledger.abort(rollout, "measured")
        await self._plane.clear(STAGING, await self._plane.keys(STAGING))
        ordered = [replies[rollout] for rollout in rollouts]
        return Round(sum(reply.completion_tokens for reply in ordered), seconds, cpu), ordered

    def _cpu_s(self) -> float:
        """Of this process and all that it started, but not of the engine core that the worker has."""
        return sum(map(_cpu_s, {os.getpid(), *_below(os.getpid())} - _below(self._worker)))


def _below(pid: int) -> set[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = {int(child) for task in tasks for child in (task / "children").read_text().split()}
    except OSError:
        return set()
    return children.union(*(_below(child) for child in children))


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICK


@asynccontextmanager
async def through(model: Path, kind: Literal["torch", "vllm"]) -> AsyncGenerator[Through]:
    with tempfile.TemporaryDirectory() as folder:
        async with start_servers(timeout_s=180) as servers:
            spec = GenerationSpec(name="gen", model_path=str(model), engine=engine_spec(kind), plane=servers.spec)
            async with launch(
                "workers.generation", name="gen", spec=spec, on_line=quiet, start_timeout_s=300
            ) as worker:
                plane = await connect(servers.spec)
                journal, _ = await Journal.open(Path(folder))
                ledger = Ledger(journal)
                pool = GenerationPool([Member.serving(worker.client)], call_timeout_s=600, on_call=ignore)
                gate = Gate(ledger, pool.generate, max_calls_per_rollout=1, call_timeout_s=600)
                try:
                    yield Through(gate, ledger, plane, worker.pid)
                finally:
                    await journal.aclose()
                    await plane.aclose()


@asynccontextmanager
async def bare(model: Path) -> AsyncGenerator[RpcClient]:
    async with start_servers(timeout_s=180) as servers:
        spec = GenerationSpec(name="bare", model_path=str(model), engine=engine_spec("vllm"), plane=servers.spec)
        async with launch("benchmarks.bare_vllm", name="bare", spec=spec, on_line=quiet, start_timeout_s=300) as worker:
            yield worker.client


def engine_spec(kind: Literal["torch", "vllm"]) -> EngineSpec:
    return EngineSpec(kind=kind, max_batch=64, max_model_len=512, threads=int(os.environ.get("OMP_NUM_THREADS", "1")))


def ignore(rollout_id: str, start_s: float, end_s: float) -> None:
    """No trace is kept of the calls."""


def quiet(name: str, line: str) -> None:
    """What the workers print is not shown."""


async def compare(model: Path, lengths: tuple[int, ...], calls: int, concurrency: int, rounds: int) -> Any:
    """For each length the best rounds: through all of it, bare, and through all of it on torch."""
    renderer = ChatRenderer.load(model)
    conversations = [(Message(role="user", content=f"Count from {n} on."),) for n in range(calls)]
    prompts = [await renderer.render_root(messages) for messages in conversations]
    best: dict[tuple[str, int], Round] = {}

    def keep(name: str, length: int, result: Round) -> None:
        best[name, length] = max(best.get((name, length), result), result, key=lambda r: r.rate)

    async with through(model, "vllm") as path, bare(model) as engine:
        for turn in range(rounds + 1):  # the first one warms up
            for length in lengths:
                result, replies = await path.round(conversations, Sampling(max_tokens=length), concurrency)
                load = Load(
                    prompts=prompts,
                    lengths=[reply.completion_tokens for reply in replies],
                    concurrency=concurrency,
                )
                done = await engine.call(RUN, load)
                if turn > 0:
                    keep("vllm", length, result._replace(cpu_s=result.cpu_s - done.cpu_s))
                    keep("bare", length, Round(result.tokens, done.seconds, done.cpu_s))
    async with through(model, "torch") as path:
        for _ in range(rounds + 1):
            result, _replies = await path.round(conversations, Sampling(max_tokens=lengths[-1]), concurrency)
            keep("torch", lengths[-1], result)
    for (name, length), result in best.items():
        print(f"{model.name}: up to {length} tokens, {name}: {result.rate:,.0f} tokens/s", flush=True)
    return best


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    calls, concurrency, rounds = arguments.calls, arguments.concurrency, arguments.rounds
    short, long = 16, 256
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "tiny", seed=1, head_dim=32)
        tiny = await compare(model, (short, long), calls, concurrency, rounds)
    few, many = tiny["vllm", short], tiny["vllm", long]
    per_token = (many.cpu_s - few.cpu_s) / (many.tokens - few.tokens)
    figures: dict[str, Any] = {
        "ratio_smollm2": None,
        "ratio_tiny": round(many.rate / tiny["bare", long].rate, 3),
        "cpu_us_per_token": round(per_token * 1e6, 1),
        "cpu_us_per_call": round((few.cpu_s - per_token * few.tokens) / calls * 1e6),
        "tokens_per_s_tiny": {name: round(tiny[name, long].rate) for name in ("vllm", "bare", "torch")},
    }
    if arguments.smollm2.is_dir():
        real = await compare(arguments.smollm2, (64,), calls // 2, concurrency // 2, rounds)
        figures["ratio_smollm2"] = round(real["vllm", 64].rate / real["bare", 64].rate, 3)
        figures["tokens_per_s_smollm2"] = {name: round(real[name, 64].rate) for name in ("vllm", "bare", "torch")}
    else:
        print(f"{arguments.smollm2} does not exist; examples/prepare_smollm2.py makes it")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smollm2", type=Path, default=Path("models/smollm2"), help="model directory")
    parser.add_argument("--calls", type=int, default=128, help="calls of a round")
    parser.add_argument("--concurrency", type=int, default=64, help="calls at the same time")
    parser.add_argument("--rounds", type=int, default=3)
    figures = anyio.run(measure, parser.parse_args(), backend_options={"use_uvloop": True})
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
