"""A run as an async context manager: entering starts everything, leaving takes everything down.

Invariant: when the scope is left, however it is left, no process that it started is alive and no row that it wrote is left.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import ObjectSendStream, TaskGroup

from controller.checkpoint import Checkpoints, read_state
from controller.config.checks import check_config
from controller.config.problems import ConfigError
from controller.config.schema import Config
from controller.evaluation import draw_held_out, without_held_out
from controller.first_error import first_error, lost_connection
from controller.gateway import control_file, open_listener
from controller.interpreter import quiet_interpreter
from controller.interrupts import Interrupted, open_interrupts
from controller.machinery import Machinery, start_machinery
from controller.observer import Observer, open_observer
from controller.own_sampler import make_sampler
from controller.prompts import PromptSource
from controller.reporting.frame import ProgressSnapshot
from controller.reporting.step_report import StepReport
from controller.reporting.summary import RunSummary, first_line
from controller.run import Run
from controller.run_dir import CHECKPOINTS, Resume, open_run_dir
from controller.run_ledger import open_run_ledger
from controller.sentinel.sentinel import Sentinel
from controller.threads import in_thread
from controller.waits.graph import WaitGraph
from controller.waits.server import StatusServer, status_file
from controller.waits.text import describe
from controller.waits.view import idle_graph
from controller.watchdog import RunStalled
from controller.wind_down import Status, WindDown
from workers.environments.base import Environment, Prompt
from workers.environments.offload import stop_idle_workers
from workers.environments.registry import make_environment
from workers.open_files import allow_many_connections

DEATH_NEWS_S = 3.0
"""After a broken connection, how long to wait for the news that the process behind it has died."""
STACKS_FILE = "stacks.txt"


class Controller:
    """One run: `async with Controller(config) as c:` and then either `await c.run()` or `async for step in c.steps()`.

    `environment` and `prompts` replace what the configuration names; `prompts` must give the same order at every resume.
    `on_step` is called after each step, and training goes on when it returns. In the main thread SIGINT and SIGTERM are
    handled: the first stops the run at a checkpoint, the second ends the process. An error of the caller's own between two
    `steps` stops it at a checkpoint too. Any error ends the run and is raised as itself, not in a group.
    """

    def __init__(
        self,
        config: Config,
        *,
        environment: Environment | None = None,
        prompts: Iterator[Prompt] | None = None,
        on_step: Callable[[StepReport], Awaitable[None] | None] | None = None,
        resume: Resume = "auto",
    ) -> None:
        self._config = config
        self._environment = environment
        self._prompts = prompts
        self._on_step = on_step
        self._resume: Resume = resume
        self._hand_out: ObjectSendStream[StepReport] | None = None
        self._run: Run | None = None
        self._used = False
        self._error: BaseException | None = None
        """Of the run."""
        self._left_by = ""
        """The caller's error, if the scope was left by one."""
        self._ending = ""
        """Why the run ends, in a line, from then on."""
        self.summary: RunSummary | None = None
        """Set when the run has ended."""

    async def __aenter__(self) -> Self:
        self._began = time.monotonic()
        try:
            async with AsyncExitStack() as stack:
                self._interrupts = await stack.enter_async_context(open_interrupts())
                await self._start(stack)
                self._stack = stack.pop_all()
                return self
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        raise self._interrupted()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, anyio.get_cancelled_exc_class()):
            self._left_by = f"the caller's code raised {type(error).__name__}: {error}"
        self._interrupts.stop()
        try:
            swallowed = await self._stack.__aexit__(kind, error, trace)
        except (Exception, BaseExceptionGroup) as late:
            # What ended the run is told, not what its end then met; a full disk fails the reports too.
            first = first_error(late if self._error is None else BaseExceptionGroup("", [self._error, late]))
            if first is late:
                raise
            raise first from None
        if swallowed:
            raise self._interrupted()

    async def run(self) -> RunSummary:
        """Train to the last step, or until the prompts are used up, and wind everything down. Once per Controller.

        After a signal it returns too, and the summary says so. Raises the first error of the run.
        """
        self._require_ready()
        assert self._run is not None
        self._used = True
        status: Status = "finished"
        reason = None
        error: BaseException | None = None
        try:
            with self._interrupts.scope() as scope:
                await self._run.pump()
            if scope.cancelled_caught:
                status = "interrupted"
                reason = "the caller left" if self._interrupts.signal is None else self._interrupts.signal.name
        except BaseException as e:
            error = first_error(e)
            deaths = self._machinery.deaths
            if lost_connection(e):
                await deaths.news(DEATH_NEWS_S)
            cause = deaths.first or error
            status = "stalled" if isinstance(cause, RunStalled) else "failed"
            reason = f"{type(cause).__name__}: {cause}"
            if isinstance(cause, anyio.get_cancelled_exc_class()):
                status = "interrupted" if self._left_by else "failed"
                reason = self._left_by or "cancelled, by the caller or for the error that is raised"
        self._sentinel.pause()
        self._ending = f"{status}, {first_line(reason)}" if reason else status
        if error is not None:
            # Now: what follows may take long, or hang where this error came from.
            self._observer.progress.warning(f"the run ends: {self._ending}")
        wind_down = WindDown(self._config, self._run, self._machinery, self._observer, self._run_dir)
        # A first signal that comes only now changes nothing: outside of this scope it would stop a trainer that is saving.
        with self._interrupts.scope(), anyio.CancelScope(shield=True):
            self.summary = await wind_down.finish(status, reason, began=self._began)
        if error is not None:
            self._error = error
            raise error
        if wind_down.failure is not None:
            raise wind_down.failure
        assert self.summary is not None
        return self.summary

    async def steps(self) -> AsyncIterator[StepReport]:
        """The run's steps, one report each; training goes on while the loop's body runs, by at most one step.

        Leaving the loop early stops the run when the Controller's scope is left. `summary` is set when the loop has ended.
        """
        self._require_ready()
        send, receive = anyio.create_memory_object_stream[StepReport](0)
        self._hand_out = send
        self._tasks.start_soon(self._run_to, send)
        async with receive:
            async for report in receive:
                yield report

    def _require_ready(self) -> None:
        if self._run is None or self._used:
            raise RuntimeError("call run() or steps() once, inside `async with Controller(...) as c:`")

    async def _run_to(self, reports: ObjectSendStream[StepReport]) -> None:
        async with reports:
            await self.run()

    async def _start(self, stack: AsyncExitStack) -> None:
        config = self._config
        allow_many_connections()
        findings = await anyio.to_thread.run_sync(check_config, config)
        if findings.problems:
            raise ConfigError(findings.problems)
        # Before the folder: a mistake in it must not move an older run aside.
        environment, prompts, held_out = await anyio.to_thread.run_sync(self._make_environment, abandon_on_cancel=True)
        run_dir = open_run_dir(config.run, self._resume, config.evaluation)
        self._run_dir, checkpoint = await stack.enter_async_context(in_thread(run_dir))
        resumed = None if checkpoint is None else await anyio.to_thread.run_sync(read_state, checkpoint)
        await anyio.to_thread.run_sync(_write_config, self._run_dir, config)
        listener = await stack.enter_async_context(open_listener(config.gate))
        self._observer: Observer = await stack.enter_async_context(
            open_observer(
                self._run_dir,
                steps=config.run.steps,
                first_step=0 if resumed is None else resumed.step,
                snapshot=self._snapshot,
            )
        )
        doing = self._observer.doing
        self._sentinel = stack.enter_context(
            Sentinel(
                report_over_ms=config.loop.report_over_ms,
                fail_over_ms=config.loop.fail_over_ms,
                exit_after_s=config.loop.exit_after_s,
                last_words=lambda: describe(self._waits()),
                stacks_file=self._run_dir / STACKS_FILE,
            )
        )
        self._sentinel.pause()
        self._interrupts.blocked_at = lambda: f"at {self._sentinel.where()}"
        url = await stack.enter_async_context(in_thread(StatusServer(self._sentinel, self._waits).serving()))
        await stack.enter_async_context(in_thread(status_file(self._run_dir, url)))
        self._observer.progress.note(f"status: {url}, or: python -m controller status {self._run_dir}")
        self._interrupts.on_first = self._observer.progress.note
        ledger = await stack.enter_async_context(
            open_run_ledger(config, self._run_dir, resumed_from=None if resumed is None else resumed.step)
        )
        self._machinery: Machinery = await stack.enter_async_context(
            start_machinery(config, on_line=self._observer.worker_line, phase=doing)
        )
        checkpoints = Checkpoints(
            self._run_dir / CHECKPOINTS,
            keep=config.checkpoint.keep,
            trainer=self._machinery.trainer,
            timeout_s=config.training.step_timeout_s,
        )
        if checkpoint is not None:
            doing(f"loading {checkpoint}")
            await checkpoints.load(checkpoint)
        self._run = Run(
            config,
            machinery=self._machinery,
            ledger=ledger,
            environment=environment,
            prompts=PromptSource(
                prompts,
                returned=() if resumed is None else resumed.pending,
                skip=0 if resumed is None else resumed.drawn,
            ),
            held_out=held_out,
            observer=self._observer,
            checkpoints=checkpoints,
            resumed=resumed,
            on_step=self._after_step,
            listener=listener,
            sentinel=self._sentinel,
        )
        server = self._run.gate_server
        await stack.enter_async_context(in_thread(control_file(self._run_dir, listener.url, server.control_token)))
        if resumed is not None:
            doing(f"bringing the engines to weight version {resumed.step}")
            await self._run.weight_sync.sync(resumed.step)
        stack.push_async_callback(stop_idle_workers)
        stack.enter_context(quiet_interpreter())
        self._sentinel.judge()
        self._tasks: TaskGroup = await stack.enter_async_context(anyio.create_task_group())
        doing(None)

    def _make_environment(self) -> tuple[Environment, Iterator[Prompt], tuple[Prompt, ...]]:
        # Made anew by the run: here only for the mistakes in one of the user's own.
        make_sampler(self._config.rollout)
        settings = self._config.environment
        environment = self._environment
        if environment is None:
            environment = make_environment(settings.name, settings.args)
        for method in ("prompts", "rollout"):
            if not callable(getattr(environment, method, None)):
                raise TypeError(
                    f"environment: {environment!r} has no method {method}(); see workers.environments.base.Environment"
                )
        prompts = environment.prompts(self._config.run.seed) if self._prompts is None else self._prompts
        held_out = draw_held_out(environment, self._config.evaluation)
        return environment, without_held_out(iter(prompts), held_out), held_out

    def _waits(self) -> WaitGraph:
        """Who waits for what: of the run while it trains, else only what the controller is at."""
        if self._run is not None and self._observer.activity is None:
            return self._run.waits()
        doing = self._observer.activity or "training"
        return idle_graph(self._observer.name, doing, self._sentinel, ending=self._ending)

    def _snapshot(self) -> ProgressSnapshot | None:
        return None if self._run is None else self._run.snapshot()

    async def _after_step(self, report: StepReport) -> None:
        if self._on_step is not None:
            outcome = self._on_step(report)
            if inspect.isawaitable(outcome):
                await outcome
        if self._hand_out is not None:
            try:
                await self._hand_out.send(report)
            except anyio.BrokenResourceError:
                self._interrupts.stop()

    def _interrupted(self) -> Interrupted:
        assert self._interrupts.signal is not None
        return Interrupted(self._interrupts.signal)


def _write_config(run_dir: Path, config: Config) -> None:
    (run_dir / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)) + b"\n")
