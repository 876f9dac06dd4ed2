"""The loop itself: buffer, ledger, gate and pumps of one run, wired together."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus
from msgspec.structs import replace

from controller.agreement import AgreementMonitor
from controller.buffer import GroupState, ReplayBuffer
from controller.checkpoint import Checkpoints, ControllerState
from controller.config.figures import generating_groups
from controller.config.schema import Config, GateConfig, RolloutConfig
from controller.context import InLoopContext
from controller.echo import Limits as EchoLimits
from controller.environment_budget import EnvironmentBudget
from controller.evaluation import Evaluator, is_held_out
from controller.finalizer import FinalizerGroup
from controller.fleet_monitor import FleetMonitor, member_of
from controller.gateway import Listener
from controller.generation_pool import GenerationPool
from controller.losses import Losses
from controller.machinery import Machinery
from controller.member import WorkerState
from controller.observer import Observer
from controller.own_sampler import make_sampler
from controller.player import Player
from controller.prompts import PromptSource
from controller.records import FinalizationRequest, TrainSample
from controller.redispatch import RedispatchBudget
from controller.reporting.frame import ProgressSnapshot
from controller.reporting.step_report import StepReport
from controller.reporting.summary import Accounts
from controller.rollout_pump import RolloutPump, number_after
from controller.run_account import RunAccount
from controller.run_state import RunState
from controller.sentinel.sentinel import Sentinel
from controller.step_summary import summarise
from controller.train_pump import TrainedStep, TrainPump
from controller.turns import Turns
from controller.waiting import ENGINES, TRAIN_PUMP, Activities
from controller.waits.graph import WaitGraph
from controller.waits.health import checks_of
from controller.waits.plane import WatchedPlane
from controller.waits.view import WaitView, idle_graph
from controller.watchdog import StallWatchdog
from controller.weight_sync import WeightSync
from ledger.gate import Gate
from ledger.http.sampling import SamplingRules
from ledger.http.server import GateServer, Limits
from ledger.ledger import Ledger
from ledger.records import CallReply, CallRequest, Sampling
from workers.environments.base import Environment, Prompt

_LONG_S = 9.0
"""After so long with one thing, the display says what holds it up."""


class Run:
    """`resumed` is the state of the checkpoint that the trainer has loaded; None begins at step 0. In `ledger` nothing is
    live; what ended in it before is not counted, the checkpoint's numbers are."""

    def __init__(
        self,
        config: Config,
        *,
        machinery: Machinery,
        ledger: Ledger,
        environment: Environment,
        prompts: PromptSource,
        held_out: Sequence[Prompt],
        observer: Observer,
        checkpoints: Checkpoints,
        resumed: ControllerState | None,
        on_step: Callable[[StepReport], Awaitable[None]],
        listener: Listener,
        sentinel: Sentinel,
    ) -> None:
        self._config = config
        self._machinery = machinery
        self._sentinel = sentinel
        self._prompts = prompts
        self._observer = observer
        self._checkpoints = checkpoints
        self._on_step = on_step
        # Groups that an earlier process dispatched after its checkpoint keep their ids.
        self._first_group = max(0 if resumed is None else resumed.next_group, number_after(ledger.last_group))
        sampler = make_sampler(config.rollout)
        self.buffer = ReplayBuffer(sampler.required_capacity())
        first_step = 0 if resumed is None else resumed.step
        self.state = RunState(self.buffer, step=first_step, last_step=config.run.steps)
        self.first_step = first_step
        capture = config.token_capture
        self.ledger = ledger
        self.account = RunAccount(ledger, self.buffer, resumed)
        self.activities = Activities()
        self.rollouts = Activities()
        """What each rollout that is being played does."""
        self.plane = WatchedPlane(machinery.plane)
        self.pool = GenerationPool(
            [member_of(worker, config.fleet) for worker in machinery.generation],
            call_timeout_s=config.rollout.call_timeout_s,
            on_call=observer.call,
            failures=config.failures,
        )
        self.fleet = FleetMonitor(
            self.pool,
            {worker.name: worker for worker in machinery.generation},
            config=config.fleet,
            load_timeout_s=config.weight_sync.timeout_s,
            activities=self.activities,
            on_state=observer.worker_state,
        )
        self.redispatch = RedispatchBudget(config.failures)
        self.environment_failures = EnvironmentBudget(config.failures)
        self.losses = Losses(config.environment.name)
        self._turns = Turns(config.rollout.turn_timeout_s)
        self._gate = Gate(
            self.ledger,
            self._generate,
            max_calls_per_rollout=config.rollout.max_calls,
            call_timeout_s=config.rollout.call_timeout_s,
            # vLLM samples row by row what has a seed of its own, and draws the rest of a batch at once.
            seed=None if config.generation.engine == "vllm" else config.run.seed,
        )
        self._sampling = _sampling(config.rollout)
        temperature = config.evaluation.temperature
        self._evaluation_sampling = replace(
            self._sampling, temperature=self._sampling.temperature if temperature is None else temperature
        )
        self._listener = listener
        self.gate_server = GateServer(
            self._gate,
            self.ledger,
            SamplingRules(
                self._sampling,
                config.gate.sampling,
                lambda rollout_id: self._evaluation_sampling if is_held_out(rollout_id) else None,
            ),
            url=listener.url,
            model=Path(config.model.path).name,
            limits=_limits(config.gate),
        )
        self.weight_sync = WeightSync(
            trainer=machinery.trainer,
            pool=self.pool,
            state=self.state,
            activities=self.activities,
            timeout_s=config.weight_sync.timeout_s,
        )
        send, receive = anyio.create_memory_object_stream[FinalizationRequest](math.inf)
        self._send = send
        self.finalizers = FinalizerGroup(
            requests=receive,
            buffer=self.buffer,
            ledger=self.ledger,
            plane=self.plane,
            activities=self.activities,
            concurrency=config.finalizer.concurrency,
            on_failure=capture.on_failure,
            echo_limits=None if capture.enabled else self._echo_limits,
            late_after_s=2 * config.dataplane.timeout_s,
            max_dropped_in_a_row=config.finalizer.max_dropped_in_a_row,
            warn=observer.progress.warning,
            failures=config.failures,
            losses=self.losses,
            evaluated=self._evaluated,
        )
        self._player = self._player_with(environment, self._sampling)
        self.evaluator = Evaluator(
            config=config.evaluation,
            questions=held_out,
            player=self._player_with(environment, self._evaluation_sampling),
            ledger=self.ledger,
            state=self.state,
            finalize=send,
            concurrency=generating_groups(config.rollout) * config.rollout.group_size,
            recorded=observer.evaluations,
            report=observer.evaluation,
        )
        self._rollouts = RolloutPump(
            config=config.rollout,
            player=self._player,
            prompts=prompts,
            buffer=self.buffer,
            state=self.state,
            sampler=sampler,
            ledger=self.ledger,
            finalize=send,
            activities=self.activities,
            first_group=self._first_group,
        )
        self._training = TrainPump(
            training=config.training,
            advantage=config.advantage,
            losses=self.losses,
            credit=capture.credit,
            seed=config.run.seed,
            buffer=self.buffer,
            state=self.state,
            sampler=sampler,
            ledger=self.ledger,
            plane=self.plane,
            trainer=machinery.trainer,
            weight_sync=self.weight_sync,
            evaluator=self.evaluator,
            agreement=AgreementMonitor(config.agreement, warn=observer.progress.warning),
            checkpoint=self.checkpoint,
            checkpoint_every=config.checkpoint.every_steps,
            report=self._report,
            after_step=self._after_step,
            on_phase=observer.phase,
            activities=self.activities,
        )
        self._waits = WaitView(
            buffer=self.buffer,
            state=self.state,
            sampler=sampler,
            pool=self.pool,
            plane=self.plane,
            weight_sync=self.weight_sync,
            activities=self.activities,
            rollouts=self.rollouts,
            environment=type(environment).__name__,
            rejections=self.finalizers.rejections,
            processes=machinery.processes,
            may_dispatch=self._rollouts.may_dispatch,
            progress=self._progress,
        )
        stall = config.watchdog
        self.watchdog = StallWatchdog(
            stall_after_s=stall.stall_after_s,
            action=stall.stall_action,
            progress=self._progress,
            graph=self.waits,
            checks=lambda seconds: checks_of(environment, self.pool, self.plane, timeout_s=seconds),
        )
        self._step_ended = time.monotonic()
        self._last_report: StepReport | None = None

    async def pump(self) -> None:
        """Run until the last step is trained or the prompts are used up. The first error of any part ends all."""
        self._step_ended = time.monotonic()
        # The gate goes last: an agent is to meet its cancellation before a server that is gone.
        gate = anyio.CancelScope(shield=True)
        async with anyio.create_task_group() as outer:
            await outer.start(self._serve, gate)
            try:
                async with anyio.create_task_group() as tg:
                    tg.start_soon(self.fleet.run)
                    tg.start_soon(self._rollouts.run)
                    tg.start_soon(self.finalizers.run)
                    tg.start_soon(self.watchdog.run)
                    tg.start_soon(self._sentinel.watch)
                    await self._training.run()
                    tg.cancel_scope.cancel()
            finally:
                gate.cancel()

    def pending(self) -> tuple[Prompt, ...]:
        """Prompts that were drawn and are not trained, dropped or evicted: what a resumed run dispatches first."""
        live = [e.group.prompt for e in self.buffer.entries if e.group is not None]
        return (*live, *self._prompts.held)

    async def checkpoint(self, pending: tuple[Prompt, ...] | None = None) -> None:
        """Write a checkpoint of the present step boundary. The controller's part is taken before anything is awaited.

        `pending` was taken earlier when the live groups have been ended since.
        """
        state = self._cut(self.pending() if pending is None else pending)
        await self._observer.writer.flush()
        await self._checkpoints.save(state)
        await self.ledger.checkpointed(state.step)

    async def end_live_groups(self, reason: str) -> None:
        """End every group that is still live as aborted. To be called when the pumps have stopped."""
        for entry in tuple(self.buffer.entries):
            self.buffer.abort(entry.group_id)
            await anyio.lowlevel.checkpoint()
        await self.ledger.give_up(reason)

    def accounts(self) -> tuple[Accounts, Accounts]:
        """Rollouts and groups of the whole run."""
        return self.account.rollouts(), self.account.groups(self._rollouts.next_group - self._first_group)

    def waits(self) -> WaitGraph:
        """Who waits for what now."""
        idle = idle_graph(self._observer.name, self._observer.activity or "training", self._sentinel)
        return self._waits.take(idle, self.watchdog.unhealthy)

    def _progress(self) -> tuple[int, int]:
        """Groups committed, those of an evaluation too, and steps done."""
        return self.finalizers.committed + self.evaluator.played, self.state.step

    async def _serve(self, scope: anyio.CancelScope, *, task_status: TaskStatus[None]) -> None:
        with scope:
            await self.gate_server.serve(self._listener.socket, task_status=task_status)

    async def _generate(self, request: CallRequest) -> CallReply:
        doing = self.rollouts.doing(request.rollout_id, "waits for the model", on=ENGINES)
        with doing, self._turns.in_call(request.rollout_id):
            return await self.pool.generate(request)

    def snapshot(self) -> ProgressSnapshot:
        calls = self.pool.outstanding
        counts = self.buffer.counts()
        activity = self.activities.now().get(TRAIN_PUMP)
        what = "starting" if activity is None else activity.what
        if self.evaluator.remaining:
            what = f"{what} ({self.evaluator.remaining} rollouts to go)"
        culprit = None if activity is None or activity.seconds < _LONG_S else self.waits().culprit
        return ProgressSnapshot(
            step=self.state.step,
            activity=what,
            activity_since=time.monotonic() if activity is None else activity.since,
            rollouts={
                "generating": calls,
                "scoring": self._playing - calls,
                "finalizing": counts.get(GroupState.FINALIZING, 0) * self._config.rollout.group_size,
            },
            buffer=counts,
            weight_version=self.state.version,
            held_up_by="" if culprit is None else str(culprit),
        )

    @property
    def _playing(self) -> int:
        return self._player.playing + self.evaluator.playing

    def _cut(self, pending: tuple[Prompt, ...]) -> ControllerState:
        return ControllerState(
            step=self.state.step,
            drawn=self._prompts.drawn,
            pending=pending,
            next_group=self._rollouts.next_group,
            rollouts=self.account.rollout_ends(),
            groups=self.account.group_ends(),
            seed=self._config.run.seed,
        )

    def _player_with(self, environment: Environment, sampling: Sampling) -> Player:
        def context(rollout_id: str) -> InLoopContext:
            return InLoopContext(
                rollout_id,
                gate=self._gate,
                sampling=sampling,
                base_url=self.gate_server.base_url(rollout_id),
                api_key=self.gate_server.api_key(rollout_id),
            )

        return Player(
            environment=environment,
            ledger=self.ledger,
            make_context=context,
            trouble=self.pool.trouble,
            forget=self._forget,
            activities=self.rollouts,
            budget=self.redispatch,
            failures=self.environment_failures,
            turns=self._turns,
            timeout_s=self._config.rollout.timeout_s,
            echo=not self._config.token_capture.enabled,
        )

    def _echo_limits(self) -> EchoLimits:
        return EchoLimits(
            vocab_size=self._machinery.vocab_size,
            max_tokens=self._machinery.max_model_len,
            version=self.state.version,
        )

    def _forget(self, rollout_id: str) -> None:
        self.pool.forget(rollout_id)
        self.gate_server.forget(rollout_id)

    def _evaluated(self, group_id: str, samples: Sequence[TrainSample]) -> None:
        self.evaluator.evaluated(group_id, samples)

    def _report(self, done: TrainedStep) -> None:
        now = time.monotonic()
        report = summarise(
            done,
            seconds=now - self._step_ended,
            counts=self.account.counts(),
            buffer=self.buffer,
            data_plane={**self.finalizers.take_timings(), **self._machinery.plane.take_metrics()},
            custody=self.finalizers.take_counts(),
            loop=self._sentinel.take_figures(),
            fleet=self._fleet_metrics(),
            losses=self.losses.metrics(),
        )
        self._step_ended = now
        self._last_report = report
        self._observer.step(report)

    def _fleet_metrics(self) -> dict[str, float]:
        """How the generation workers are, and what was tried again since the run began."""
        members = self.pool.members
        return {
            "serving": sum(m.state is WorkerState.SERVING for m in members),
            "calls_waiting": self.pool.waiting,
            "call_limit": sum(m.limit.now for m in members if m.state is WorkerState.SERVING),
            **{name: self.fleet.counts[name] for name in ("quarantined", "restarted", "retired")},
            **{name: self.pool.counts[name] for name in ("calls_retried", "calls_lost")},
            "rollouts_lost": self.redispatch.lost,
            "rollouts_played_again": self.redispatch.again,
            "environment_failures": self.environment_failures.failed,
        }

    async def _after_step(self) -> None:
        assert self._last_report is not None
        with self.activities.doing(TRAIN_PUMP, "waiting for the caller's step callback"):
            await self._on_step(self._last_report)


def _sampling(rollout: RolloutConfig) -> Sampling:
    return Sampling(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=rollout.stop_token_ids,
    )


def _limits(gate: GateConfig) -> Limits:
    return Limits(**{name: getattr(gate, name) for name in Limits.__struct_fields__})
