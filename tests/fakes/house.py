"""A whole run on fakes: the real `Run` (pumps, gate, ledger, buffer, finalizers, fleet monitor, watchdog), and around it an
engine per generation worker, a trainer and a data plane that can be frozen, slowed, spoiled and killed at any moment.

Wound down as by the controller: live groups ended, workers stopped, partitions swept.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import anyio
from anyio.abc import TaskGroup

from controller.config.schema import Config
from controller.deaths import Deaths
from controller.first_error import first_error
from controller.gateway import Listener
from controller.machinery import Machinery
from controller.prompts import PromptSource
from controller.reporting.step_report import StepReport
from controller.run import Run
from controller.sentinel.lag import LagHistogram
from dataplane.errors import DataPlaneDown
from dataplane.plane import DataPlane
from ledger.events import EventLog, MemoryLog
from ledger.http.connections import listen
from ledger.ledger import Ledger
from tests.fakes.engine import MAX_MODEL_LEN, VOCAB_SIZE, FakeEngine, generation_handlers, heavy_tailed
from tests.fakes.plane import FakePlane, FakeStore, nothing_refused
from tests.fakes.process import FakeProcess, Handlers, Life
from tests.fakes.trainer import FakeTrainer, Trained
from workers.generation.engine import Generation


@dataclass
class Speed:
    """How long things take on the fakes, in seconds."""

    token: float = 0.02
    """Of one request; all running ones get theirs at the same time."""
    length: Callable[[random.Random, int], int] = field(default_factory=lambda: heavy_tailed(12))
    trained_token: float = 0.001
    finish: float = 0.2
    load: float = 0.1
    message: Callable[[], float] = lambda: 0.001
    row_operation: Callable[[], float] = lambda: 0.002


class SilentObserver:
    """Keeps what a person would be told."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.reports: list[StepReport] = []
        self.name = "run"
        self.activity = None
        self.evaluations = ()
        self.progress = self
        self.writer = self

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    def step(self, report: StepReport) -> None:
        self.reports.append(report)

    async def flush(self) -> None:
        await anyio.lowlevel.checkpoint()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class NoSentinel:
    """Watches no loop: on a virtual clock there is nothing to see."""

    def __init__(self) -> None:
        self.lag = LagHistogram()
        self.stalls: dict[str, int] = {}
        self.stood_still_s = 0.0
        self.silent_s = 0.0

    async def watch(self) -> None:
        await anyio.sleep_forever()

    def take_figures(self) -> dict[str, float]:
        return {}


class NoCheckpoints:
    """Has the trainer save, and writes nothing."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    async def save(self, state: Any) -> None:
        self.states.append(state)
        await anyio.lowlevel.checkpoint()


class FakeHouse:
    """Use `open_house`. `error` is what ended the run, None when it came to its own end."""

    def __init__(
        self,
        config: Config,
        *,
        tasks: TaskGroup,
        environment: Any,
        speed: Speed,
        seed: int,
        log: EventLog | None,
        remember: bool,
        listener: Listener,
        generation: Sequence[Any] | None,
        trainer: Any | None,
        plane: DataPlane | None,
        sentinel: Any | None,
    ) -> None:
        self.config = config
        self.environment = environment
        self.error: BaseException | None = None
        self.rng = random.Random(seed)
        self.store = FakeStore(tasks, self.rng, latency_s=speed.row_operation)
        self.plane: DataPlane = plane or FakePlane(self.store, timeout_s=config.dataplane.timeout_s)
        self.emitted: dict[str, list[tuple[list[int], Generation]]] = {}
        """By rollout: every prompt that an engine got, with what it emitted."""
        self.trained = Trained()
        self.observer = SilentObserver()
        self.checkpoints = NoCheckpoints()
        self._speed = speed
        self._remember = remember
        self.engines: dict[str, FakeEngine] = {}
        """Of the present lives, by worker."""
        self.on_engine: Callable[[FakeEngine], None] = lambda engine: None
        """Hears of each engine when it comes up."""
        self.workers = tuple(
            FakeProcess(f"generation-{i}", tasks, self._boot_engine, latency_s=speed.message)
            for i in range(config.generation.workers if generation is None else 0)
        )
        self.trainer = FakeProcess("training", tasks, self._boot_trainer, latency_s=speed.message)
        for process in (*self.workers, self.trainer):
            process.come_up()
        self.deaths = Deaths()
        fleet: Any = self
        self.machinery = Machinery(
            plane=self.plane,
            fleet=fleet,
            deaths=self.deaths,
            trainer=trainer or cast(Any, self.trainer.client),
            generation=tuple(self.workers if generation is None else generation),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
        )
        self.log = log or MemoryLog()
        capture = config.token_capture
        observer: Any = self.observer
        checkpoints: Any = self.checkpoints
        self.run = Run(
            config,
            machinery=self.machinery,
            ledger=Ledger(self.log, trajectory=capture.trajectory if capture.enabled else "echo"),
            environment=environment,
            prompts=PromptSource(iter(environment.prompts(config.run.seed))),
            held_out=(),
            observer=observer,
            checkpoints=checkpoints,
            resumed=None,
            on_step=_nothing,
            listener=listener,
            sentinel=sentinel or cast(Any, NoSentinel()),
        )
        self.left: dict[str, list[str]] = {}
        """Rows that were left, by partition, after the sweep."""
        self.before_sweep: dict[str, list[str]] = {}
        """Keys that nobody had cleared when the run ended, by partition."""
        self.swept: dict[str, int] = {}
        """How many of them the sweep found."""
        self.pids: list[int] = []

    @property
    def processes(self) -> dict[str, FakeProcess]:
        return {process.name: process for process in (*self.workers, self.trainer)}

    async def play(self) -> None:
        """Run to the end, and wind down. What ended the run is in `error`; only a failed check of a test is raised."""
        try:
            async with anyio.create_task_group() as tg:
                tg.start_soon(self.deaths.watch, self.trainer.watch)
                tg.start_soon(self.deaths.watch, self._storage_down)
                await self.run.pump()
                tg.cancel_scope.cancel()
        except AssertionError:
            raise
        except Exception as error:
            self.error = self.deaths.first or first_error(error)
            if isinstance(self.error, AssertionError):
                raise
        with anyio.CancelScope(shield=True):
            await self.run.end_live_groups("the run ended")
            await self.stop()
            if not self.store.down:
                self.store.thaw()
                self.store.slowness = 1.0
                self.store.refuses = nothing_refused
                self.before_sweep = await self.store.held()
                self.swept = await self.machinery.sweep()
                self.left = {partition: keys for partition, keys in (await self.store.held()).items() if keys}

    async def stop(self) -> None:
        """End all workers: they are the fleet's."""
        for process in (*self.workers, self.trainer):
            process.kill()
        await anyio.sleep(0.01)

    def _boot_engine(self, life: Life) -> Handlers:
        engine = FakeEngine(
            life,
            token_s=self._speed.token,
            length=self._speed.length,
            max_batch=self.config.generation.max_batch,
            load_s=self._speed.load,
            memory=self.emitted if self._remember else None,
        )
        life.process.on_pace = engine.set_pace
        self.engines[life.process.name] = engine
        self.on_engine(engine)
        return generation_handlers(engine, self._plane_of(life))

    def _boot_trainer(self, life: Life) -> Handlers:
        trainer = FakeTrainer(
            life,
            self._plane_of(life),
            trained=self.trained,
            step_s=lambda tokens: tokens * self._speed.trained_token,
            finish_s=self._speed.finish,
        )
        return trainer.handlers()

    def _plane_of(self, life: Life) -> DataPlane:
        if not isinstance(self.plane, FakePlane):
            return self.plane
        return FakePlane(self.store, timeout_s=self.config.dataplane.timeout_s, alive=lambda: not life.over.is_set())

    async def _storage_down(self) -> NoReturn:
        await self.store.gone.wait()
        raise DataPlaneDown("the data plane's server storage-0 died: signal 9")


@asynccontextmanager
async def open_house(
    config: Config,
    environment: Any,
    *,
    speed: Speed | None = None,
    seed: int = 0,
    log: EventLog | None = None,
    remember: bool = True,
    generation: Sequence[Any] | None = None,
    trainer: Any | None = None,
    plane: DataPlane | None = None,
    sentinel: Any | None = None,
) -> AsyncGenerator[FakeHouse]:
    """A run that is ready to `play`. `remember` keeps what the engines emit.

    `generation`, `trainer`, `plane` and `sentinel` are used instead of fakes: `ReplaceableWorker`s, an `RpcClient`, a data
    plane, and the sentinel of the loop.
    """
    with listen("127.0.0.1", 0) as bound:
        listener = Listener(bound, f"http://127.0.0.1:{bound.getsockname()[1]}")
        async with anyio.create_task_group() as tasks:
            yield FakeHouse(
                config,
                tasks=tasks,
                environment=environment,
                speed=speed or Speed(),
                seed=seed,
                log=log,
                remember=remember,
                listener=listener,
                generation=generation,
                trainer=trainer,
                plane=plane,
                sentinel=sentinel,
            )
            tasks.cancel_scope.cancel()


async def _nothing(_: object) -> None:
    pass
