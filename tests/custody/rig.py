"""The way of a rollout through the real parts, from the gate to the trainer's calls, with scripted ends: an engine that
emits odd tokens and remembers them, and a trainer that remembers what it was asked to train."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np

from controller.agreement import AgreementMonitor
from controller.buffer import ReplayBuffer
from controller.config.schema import (
    AdvantageConfig,
    AgreementConfig,
    EvaluationConfig,
    FailuresConfig,
    TrainingConfig,
)
from controller.context import InLoopContext
from controller.evaluation import Evaluator
from controller.finalizer import FinalizerGroup
from controller.generation_pool import GenerationPool
from controller.member import Member, WorkerState
from controller.player import Player
from controller.records import FinalizationRequest, PlayedRollout, PromptGroup, TrainSample
from controller.reporting.evaluation_report import EvaluationReport
from controller.run_state import RunState
from controller.samplers import Windowed
from controller.train_pump import TrainedStep, TrainPump
from controller.waiting import Activities
from controller.weight_sync import WeightSync
from dataplane.memory import MemoryPlane
from dataplane.plane import Column
from dataplane.schema import STAGING, TRAIN, TRAIN_COLUMNS
from ledger.events import EventLog, MemoryLog, Trajectory
from ledger.gate import Gate
from ledger.ledger import Ledger
from ledger.reasons import Reason
from ledger.records import CallReply, CallRequest, Message, Sampling, WeightSpan
from tests.custody.tokenizers import MERGES
from workers.environments.base import Prompt, Tokens
from workers.generation.capture import Capture
from workers.generation.engine import EngineStats, Generation
from workers.generation.rendering import ChatRenderer
from workers.rpc.errors import HandlerError, RemoteError
from workers.training import api
from workers.training.api import LossSpec

SAMPLING = Sampling(max_tokens=12)


class ScriptedEngine:
    """Emits any tokens of the vocabulary, special ones too, and remembers per call what it was given and what it emitted.

    A seed decides all. `spoil` may change a generation, or raise, as a failing engine does.
    """

    max_model_len = 100_000

    def __init__(self, tokenizer: Any, stop: Sequence[int]) -> None:
        vocab: dict[str, int] = tokenizer.get_vocab()
        self.vocab_size = 1 + max(vocab.values())
        self._apart = [(vocab[a], vocab[b]) for a, b in MERGES]
        self.weight_version = 0
        self.prompts: dict[str, list[int]] = {}
        self.emitted: dict[str, Generation] = {}
        self.spoil: Callable[[str, Generation], Generation] = lambda _, generation: generation
        self._stop = stop

    async def generate(self, request_id: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
        await anyio.lowlevel.checkpoint()
        rng = random.Random(sampling.seed)
        n = rng.choice([1, 1, 2, 5, sampling.max_tokens])
        odd = [t for t in range(self.vocab_size) if t not in self._stop]
        tokens: list[int] = []
        while len(tokens) < n:  # Some are tokens that no encoder would leave apart.
            tokens += rng.choice(self._apart) if rng.random() < 0.5 else (rng.choice(odd),)
        if rng.random() < 0.05:
            tokens[rng.randrange(len(tokens))] = self._stop[0]  # A stop token that did not stop it.
        finish = rng.choice(["stop", "stop", "stop", "length"])
        if finish == "stop":
            tokens = [*tokens[: sampling.max_tokens - 1], rng.choice(self._stop)]
        tokens = tokens[: sampling.max_tokens]
        generation = Generation(
            token_ids=tokens,
            logprobs=[-rng.random() * 5 for _ in tokens],
            finish_reason=finish,
            weight_spans=self._spans(rng, len(tokens)),
        )
        generation = self.spoil(request_id, generation)
        self.prompts[request_id], self.emitted[request_id] = list(prompt), generation
        return generation

    def _spans(self, rng: random.Random, n: int) -> tuple[WeightSpan, ...]:
        cut = rng.randint(0, n)
        ends = [(self.weight_version, 0, cut), (self.weight_version + 1, cut, n)]
        return tuple(WeightSpan(*end) for end in ends if end[1] < end[2])

    def conversation(self, call_id: str) -> list[int]:
        """All tokens after the call, as the engine knows them."""
        return [*self.prompts[call_id], *self.emitted[call_id].token_ids]

    async def abort(self, request_id: str) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def load_weights(self, path: Path, version: int) -> None: ...
    async def watch(self) -> Any: ...
    async def aclose(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(running=0, waiting=0, kv_usage=0.0, generated_tokens=0, weight_version=self.weight_version)


class WorkerClient:
    """A generation worker without the process: the capture behind the wire's encoding. `lose` drops replies on the way."""

    name = "generation-0"

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.lose: Callable[[CallRequest], bool] = lambda _: False

    async def call(self, method: Any, request: Any, *, timeout: float | None = None) -> Any:
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=CallRequest)
        try:
            reply = await self._capture.answer(sent)
        except HandlerError as e:
            raise RemoteError(e.failure) from e
        if self.lose(request):
            raise ConnectionResetError("the worker died after it had staged the row")
        return msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=CallReply)


@dataclass
class TrainerClient:
    """Remembers each step's totals and rows, as the data plane had them when they were trained."""

    plane: MemoryPlane
    begun: list[api.BeginStep] = field(default_factory=list)
    rows: list[api.TrainRow] = field(default_factory=list)
    columns: dict[str, dict[str, Column]] = field(default_factory=dict)
    folder: Path = Path()

    async def call(self, method: Any, request: Any, *, timeout: float | None = None) -> Any:
        match request:
            case api.BeginStep():
                self.begun.append(request)
            case api.Microbatch():
                keys = [row.key for row in request.rows]
                found = await self.plane.get(request.partition, keys, TRAIN_COLUMNS)
                assert not set(keys) & set(self.columns), "trained twice"
                self.rows += request.rows
                self.columns |= dict(zip(keys, found, strict=True))
            case api.FinishStep():
                zero: dict[str, Any] = dict.fromkeys(api.StepMetrics.__struct_fields__, 0.0)
                agreement = api.Agreement(
                    tokens=0, difference_mean=0.0, difference_max=0.0, kl=0.0, ratio_quantiles=(1.0,) * 5
                )
                zero |= {"kl_reference": None, "tokens": 0, "agreement": agreement, "agreement_by_age": {}}
                return api.StepMetrics(**zero)
            case _:
                pass
        return None


class House:
    """Everything between an agent and the trainer. `play` a group with a function per rollout, then `train`."""

    def __init__(
        self,
        folder: Path,
        *,
        trajectory: Trajectory = "terminal",
        log: EventLog | None = None,
        plane: MemoryPlane | None = None,
        engine: ScriptedEngine | None = None,
        estimator: Any = "grpo",
        loss: LossSpec | None = None,
        credit: Any = "equal",
        groups_per_step: int = 1,
        max_calls: int = 64,
        call_timeout_s: float = 30.0,
        call_attempts: int = 4,
        renderer: ChatRenderer | None = None,
        environment: Any = None,
        evaluation: EvaluationConfig | None = None,
        questions: Sequence[Prompt] = (),
        recorded: Sequence[EvaluationReport] = (),
        rollout_timeout_s: float = 30.0,
        **finalizer: Any,
    ) -> None:
        """`environment` plays the `questions` of evaluations, four rollouts at a time."""
        self.renderer = renderer or ChatRenderer.load(folder)
        self.plane = plane or MemoryPlane()
        self.engine = engine or ScriptedEngine(self.renderer._tokenizer, self.renderer.stop_token_ids)
        self.client = WorkerClient(Capture(self.engine, self.renderer, self.plane))
        self.pool = GenerationPool(
            [Member.serving(self.client)],  # type: ignore[arg-type]
            call_timeout_s=call_timeout_s,
            on_call=lambda *_: None,
            failures=FailuresConfig(call_attempts=call_attempts),
        )
        self.log = log or MemoryLog()
        self.ledger = Ledger(self.log, trajectory=trajectory)
        self.gate = Gate(
            self.ledger,
            lambda request: self.pool.generate(request),
            max_calls_per_rollout=max_calls,
            call_timeout_s=call_timeout_s,
        )
        self.buffer = ReplayBuffer(64)
        self.state = RunState(self.buffer, step=0, last_step=1)
        self.send, receive = anyio.create_memory_object_stream[FinalizationRequest](64)
        activities = Activities()
        self.finalizers = FinalizerGroup(
            requests=receive,
            buffer=self.buffer,
            ledger=self.ledger,
            plane=self.plane,
            activities=activities,
            concurrency=2,
            evaluated=lambda group_id, samples: self.evaluator.evaluated(group_id, samples),
            **finalizer,
        )
        self.evaluations: list[EvaluationReport] = []
        self.evaluator = Evaluator(
            config=evaluation or EvaluationConfig(),
            questions=questions,
            player=Player(
                environment=environment,
                ledger=self.ledger,
                make_context=lambda rollout_id: InLoopContext(
                    rollout_id, gate=self.gate, sampling=SAMPLING, base_url="", api_key=""
                ),
                trouble=self.pool.trouble,
                forget=self.pool.forget,
                timeout_s=rollout_timeout_s,
            ),
            ledger=self.ledger,
            state=self.state,
            finalize=self.send,
            concurrency=4,
            recorded=recorded,
            report=self.evaluations.append,
        )
        self.trainer = TrainerClient(self.plane)
        self.steps: list[TrainedStep] = []
        client: Any = self.trainer
        self.pump = TrainPump(
            training=TrainingConfig(loss=loss or LossSpec(), max_tokens_per_microbatch=64),
            advantage=AdvantageConfig(estimator=estimator),
            credit=credit,
            buffer=self.buffer,
            state=self.state,
            sampler=Windowed(groups_per_step, 1000),
            ledger=self.ledger,
            plane=self.plane,
            trainer=client,
            weight_sync=WeightSync(
                trainer=client, pool=self.pool, state=self.state, activities=activities, timeout_s=1.0
            ),
            evaluator=self.evaluator,
            agreement=AgreementMonitor(AgreementConfig(), warn=print),
            checkpoint=_nothing,
            checkpoint_every=None,
            report=self.steps.append,
            after_step=_nothing,
            on_phase=lambda *_: None,
            activities=activities,
        )

    async def dispatch(self, group_id: str, size: int) -> list[str]:
        """A group, dispatched and open."""
        rollout_ids = [f"{group_id}.{i}" for i in range(size)]
        await self.buffer.reserve(group_id)
        group = PromptGroup(
            group_id=group_id, prompt=Prompt(id=group_id), start_version=0, rollout_ids=tuple(rollout_ids)
        )
        self.buffer.dispatch(group, target_step=0)
        await self.ledger.dispatched(group_id, group_id, rollout_ids, 0)
        for rollout_id in rollout_ids:
            await self.ledger.open(rollout_id, group_id)
        return rollout_ids

    async def play(
        self,
        group_id: str,
        *rollouts: Callable[[str], Awaitable[Any]],
        rewards: Sequence[float] | None = None,
        failures: Sequence[Reason | None] | None = None,
        tokens: Sequence[Tokens | None] | None = None,
    ) -> None:
        """Play a group and hand it to the finalizers; an exception of a rollout is the agent's own affair."""
        rollout_ids = await self.dispatch(group_id, len(rollouts))
        for rollout, rollout_id in zip(rollouts, rollout_ids, strict=True):
            await rollout(rollout_id)
        await self.end(group_id, rollout_ids, rewards=rewards, failures=failures, tokens=tokens)

    async def end(
        self,
        group_id: str,
        rollout_ids: Sequence[str],
        *,
        rewards: Sequence[float] | None = None,
        failures: Sequence[Reason | None] | None = None,
        tokens: Sequence[Tokens | None] | None = None,
    ) -> None:
        n = len(rollout_ids)
        self.buffer.begin_finalizing(group_id)
        played = [
            PlayedRollout(rollout_id=rollout_id, reward=reward, metrics={}, failure=failure, tokens=echoed)
            for rollout_id, reward, failure, echoed in zip(
                rollout_ids,
                rewards or [float(i) for i in range(n)],
                failures or [None] * n,
                tokens or [None] * n,
                strict=True,
            )
        ]
        await self.send.send(FinalizationRequest(group_id=group_id, rollouts=tuple(played)))

    async def finalize(self) -> None:
        """Finalize all that was handed over; takes no more."""
        await self.send.aclose()
        with anyio.fail_after(60):
            await self.finalizers.run()

    async def train(self) -> None:
        """One step, with what is ready."""
        self.state.exhaust()
        with anyio.fail_after(60):
            await self.pump.run()

    def samples(self) -> dict[str, TrainSample]:
        return {s.rollout_id: s for entry in self.buffer.entries for s in entry.samples}

    async def rows(self, sample: TrainSample) -> list[dict[str, Column]]:
        return await self.plane.get(TRAIN, sample.keys, TRAIN_COLUMNS)

    async def staged(self) -> list[str]:
        return await self.plane.keys(STAGING)

    def bring_back(self) -> None:
        """Have the worker serve again that a failed call took out, as the fleet's monitor does."""
        (member,) = self.pool.members
        if member.state is WorkerState.QUARANTINED:
            member.recover("it answers")
        if member.state is not WorkerState.SERVING:
            member.version = self.pool.weights.version
            member.serve("it has the present weights")

    async def chat(self, rollout_id: str, *messages: Message, **sampling: Any) -> CallReply:
        settings = msgspec.structs.replace(SAMPLING, **sampling)
        return await self.gate.chat(rollout_id, messages, sampling=settings)

    async def turns(self, rollout_id: str, *texts: str) -> list[CallReply]:
        """A linear conversation."""
        conversation: list[Message] = []
        replies: list[CallReply] = []
        for text in texts:
            conversation.append(user(text))
            replies.append(await self.chat(rollout_id, *conversation))
            conversation.append(replies[-1].message)
        return replies

    def proves(self, sample: TrainSample, rows: Sequence[dict[str, Column]], calls: dict[str, str | None]) -> int:
        """Check a trained rollout against what the engine itself knows; `calls` maps the committed ones to their parents.

        Every row is one call's whole conversation, and every loss token one that the engine emitted, at its index, with its
        logprob and version; none is a loss token twice. Returns how many there are.
        """
        trained: set[tuple[str, int]] = set()
        for ref, row in zip(sample.rows, rows, strict=True):
            ids = row["input_ids"].tolist()
            leaf = next(call for call in calls if self.engine.conversation(call) == ids)
            owners: dict[int, tuple[str, int]] = {}
            call: str | None = leaf
            while call is not None:
                start = len(self.engine.prompts[call])
                assert ids[:start] == self.engine.prompts[call]
                owners.update({start + i: (call, i) for i in range(len(self.engine.emitted[call].token_ids))})
                call = calls[call]
            for position in np.flatnonzero(row["loss_mask"]).tolist():
                owner, index = owners[position]
                generation = self.engine.emitted[owner]
                assert ids[position] == generation.token_ids[index]
                assert row["rollout_logprobs"][position] == np.float32(generation.logprobs[index])
                version = next(s.version for s in generation.weight_spans if s.start <= index < s.end)
                assert row["weight_versions"][position] == version
                assert owners[position] not in trained
                trained.add(owners[position])
            assert not row["rollout_logprobs"][row["loss_mask"] == 0].any()
            assert (ref.length, ref.loss_tokens) == (len(ids), int(row["loss_mask"].sum()))
        return len(trained)


async def _nothing() -> None:
    pass


def user(text: str) -> Message:
    return Message(role="user", content=text)


def system(text: str) -> Message:
    return Message(role="system", content=text)


def tool(text: str) -> Message:
    return Message(role="tool", content=text)
