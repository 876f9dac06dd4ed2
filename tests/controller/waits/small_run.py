"""A whole run, with its pumps, ledger, gate, fleet monitor and watchdog, over processes that are objects, to be silenced."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import msgspec

from controller.config.schema import Config
from controller.deaths import Deaths
from controller.gateway import open_listener
from controller.machinery import Machinery
from controller.observer import open_observer
from controller.prompts import PromptSource
from controller.run import Run
from controller.sentinel.sentinel import Sentinel
from dataplane.errors import DataPlaneTimeout
from dataplane.memory import MemoryPlane
from ledger.events import MemoryLog
from ledger.ledger import Ledger
from workers.environments.base import Prompt, RolloutContext, RolloutResult, Tokens
from workers.generation.api import WeightsLoaded
from workers.generation.engine import EngineStats
from workers.rpc.errors import RpcTimeout
from workers.rpc.method import Empty, Method
from workers.training import api


class Plays:
    """Rollouts that are over at once; their tokens are the environment's own."""

    def prompts(self, seed: int) -> Iterator[Prompt]:
        return (Prompt(id=f"p{i}") for i in count())

    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        tokens = Tokens(input_ids=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0.0, -1.0, -1.0], weight_versions=[0, 0, 0])
        return RolloutResult(reward=1.0, tokens=tokens)


@dataclass(eq=False)
class Process:
    """A worker behind its client. Methods in `silent` are never answered: the deadline ends the call, as over a socket."""

    name: str
    folder: Path
    silent: set[str] = field(default_factory=set)
    version: int = 0
    alive: bool = True
    generating: int = 0

    @property
    def client(self) -> Any:
        return self

    async def died(self) -> str:
        await anyio.sleep_forever()
        raise AssertionError

    async def call(self, method: Method[Any, Any], request: Any, *, timeout: float | None = None) -> Any:
        seconds = method.timeout_s if timeout is None else timeout
        if method.name in self.silent:
            self.generating += method.name == "generate"
            try:
                await anyio.sleep(seconds)
            finally:
                self.generating -= method.name == "generate"
            raise RpcTimeout(f"{self.name}: no reply to {method.name} within {seconds:g} s")
        await anyio.lowlevel.checkpoint()
        match method.name:
            case "stats":
                return EngineStats(
                    running=self.generating, waiting=0, kv_usage=0.1, generated_tokens=7, weight_version=self.version
                )
            case "load_weights":
                self.version = request.version
                return WeightsLoaded(version=self.version, seconds=0.0)
            case "publish_weights":
                path = self.folder / f"{request.version}.safetensors"
                path.touch()
                return api.Published(address=str(path), version=request.version, bytes=0, seconds=0.0)
            case "train_microbatch":
                return api.MicrobatchDone(loss=0.0, tokens=1)
            case "finish_step":
                agreement = api.Agreement(
                    tokens=0, difference_mean=0.0, difference_max=0.0, kl=0.0, ratio_quantiles=(1.0,) * 5
                )
                own: dict[str, Any] = {
                    "agreement": agreement,
                    "agreement_by_age": {},
                    "kl_reference": None,
                    "tokens": 0,
                }
                return api.StepMetrics(**dict.fromkeys(api.StepMetrics.__struct_fields__, 0.0) | own)
            case _:
                return Empty()


class Plane(MemoryPlane):
    """`frozen`: nothing is answered any more, as by a storage process that was stopped."""

    frozen = False

    async def put(self, partition: str, rows: Any, *, timeout: float | None = None) -> None:
        await self._thaw(timeout)
        await super().put(partition, rows, timeout=timeout)

    async def get(self, partition: str, keys: Any, columns: Any, *, timeout: float | None = None) -> Any:
        await self._thaw(timeout)
        return await super().get(partition, keys, columns, timeout=timeout)

    async def clear(self, partition: str, keys: Any, *, timeout: float | None = None) -> int:
        await self._thaw(timeout)
        return await super().clear(partition, keys, timeout=timeout)

    async def _thaw(self, timeout: float | None) -> None:
        if self.frozen:
            await anyio.sleep(30 if timeout is None else timeout)
            raise DataPlaneTimeout("no answer", outcome="unknown")


@dataclass(eq=False)
class SmallRun:
    run: Run
    plane: Plane
    trainer: Process
    engine: Process
    sentinel: Sentinel
    folder: Path


def small_config(folder: Path, **sections: Any) -> Config:
    document: dict[str, Any] = {
        "run": {"dir": str(folder), "steps": 1_000_000},
        "model": {"path": "models/none"},
        "environment": {"name": "own"},
        "rollout": {"groups_per_step": 2, "group_size": 2, "max_staleness": 1},
        "token_capture": {"enabled": False},
        "watchdog": {"stall_after_s": 2.0},
        "fleet": {"probe_every_s": 0.1, "probe_timeout_s": 0.2},
    }
    return msgspec.convert(document | sections, Config)


@asynccontextmanager
async def small_run(folder: Path, environment: Any = None, **sections: Any) -> AsyncGenerator[SmallRun]:
    """A run that is ready: `await s.run.pump()` trains on and on. `sections` replace the configuration's."""
    folder.mkdir(exist_ok=True)
    config = small_config(folder, **sections)
    environment = environment or Plays()
    plane, trainer, engine = Plane(), Process("training", folder), Process("generation-0", folder)
    machinery: Any = Machinery(
        plane=plane,
        fleet=None,  # type: ignore[arg-type]
        deaths=Deaths(),
        trainer=trainer,  # type: ignore[arg-type]
        generation=(engine,),  # type: ignore[arg-type]
        max_model_len=512,
        vocab_size=100,
    )
    with Sentinel(report_over_ms=60_000) as sentinel:
        async with (
            open_listener(config.gate) as listener,
            open_observer(folder, steps=config.run.steps, first_step=0, snapshot=lambda: None) as observer,
        ):
            run = Run(
                config,
                machinery=machinery,
                ledger=Ledger(MemoryLog(), trajectory="terminal" if config.token_capture.enabled else "echo"),
                environment=environment,
                prompts=PromptSource(environment.prompts(0)),
                held_out=(),
                observer=observer,
                checkpoints=None,  # type: ignore[arg-type]
                resumed=None,
                on_step=_nothing,
                listener=listener,
                sentinel=sentinel,
            )
            observer.doing(None)
            yield SmallRun(run, plane, trainer, engine, sentinel, folder)


async def _nothing(_: object) -> None: ...
