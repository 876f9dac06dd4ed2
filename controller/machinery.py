"""The processes of a run: TransferQueue's servers, the training worker, the generation workers, and the ways to reach them.

Invariant: when the scope is left no process of it is alive. Workers stop before the data plane does, so that the rows of
workers that were still writing can be swept.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from controller.config.figures import weights_folder
from controller.config.schema import Config
from controller.deaths import Deaths
from controller.fleet import Fleet, ReplaceableWorker, open_fleet
from controller.open_plane import open_plane
from controller.specs import generation_spec, training_spec
from controller.threads import in_thread
from controller.weights_dir import open_weights_dir
from dataplane.errors import DataPlaneDown
from dataplane.plane import DataPlane
from dataplane.schema import PARTITIONS
from dataplane.servers import Servers
from dataplane.spec import PlaneSpec, connect
from workers.generation.api import INFO, WorkerInfo
from workers.launch import WorkerProcess
from workers.rpc.client import RpcClient
from workers.rpc.method import Empty


class ModelMismatch(Exception):
    """The generation workers disagree, or cannot hold what the configuration asks for."""


@dataclass(frozen=True)
class Machinery:
    plane: DataPlane
    fleet: Fleet
    deaths: Deaths
    trainer: RpcClient
    generation: tuple[ReplaceableWorker, ...]
    max_model_len: int
    """Longest conversation that every engine can hold, in tokens."""
    vocab_size: int
    """Token ids are below this."""
    processes: Callable[[], Mapping[str, int]] = dict
    """Ids of the processes that run now on this machine, by name."""

    async def sweep(self) -> dict[str, int]:
        """Clear whatever is left in the run's partitions; rows found, by partition. To be called when no worker writes.

        Raises at once what is known of the data plane's death.
        """
        if isinstance(self.deaths.first, DataPlaneDown):
            raise self.deaths.first
        found: dict[str, int] = {}
        for partition in PARTITIONS:
            keys = await self.plane.keys(partition)
            found[partition] = len(keys)
            await self.plane.clear(partition, keys)
        return found


@asynccontextmanager
async def start_machinery(
    config: Config, *, on_line: Callable[[str, str], None], phase: Callable[[str], None]
) -> AsyncGenerator[Machinery]:
    """Start everything and wait until it serves. `on_line(worker, line)` gets what workers print, `phase` what is being
    done. Raises LaunchError, DataPlaneDown, ModelMismatch. A process that dies inside ends the scope with its own error."""
    async with AsyncExitStack() as stack:
        weights_dir = await stack.enter_async_context(in_thread(open_weights_dir(weights_folder(config))))
        phase("starting the data plane")
        servers = await stack.enter_async_context(
            open_plane(config.dataplane, Path(config.run.dir), start_timeout_s=config.workers.start_timeout_s)
        )
        deaths = Deaths()
        await stack.enter_async_context(_watched(servers, deaths))
        fleet = await stack.enter_async_context(open_fleet(config.workers, deaths, on_line))
        names = [f"generation-{i}" for i in range(config.generation.workers)]
        phase(f"starting workers: training, {', '.join(names)}")
        trainers: list[WorkerProcess] = []
        generation: dict[str, ReplaceableWorker] = {}
        planes: list[DataPlane] = []

        async def attach(spec: PlaneSpec) -> None:
            planes.append(await connect(spec))

        async def start_trainer() -> None:
            spec = training_spec(config, servers.spec, weights_dir)
            trainers.append(await fleet.start("workers.training", name="training", spec=spec))

        async def start_engine(name: str) -> None:
            spec = generation_spec(config, servers.spec, names.index(name))
            generation[name] = await fleet.start_replaceable("workers.generation", name=name, spec=spec)

        try:
            async with anyio.create_task_group() as tg:
                tg.start_soon(attach, servers.spec)
                tg.start_soon(start_trainer)
                for name in names:
                    tg.start_soon(start_engine, name)
        finally:
            for plane in planes:
                stack.push_async_callback(_close, plane)
        workers = tuple(generation[name] for name in names)
        engine = await _engine(config, tuple(worker.client for worker in workers))
        yield Machinery(
            plane=planes[0],
            fleet=fleet,
            deaths=deaths,
            trainer=trainers[0].client,
            generation=workers,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            processes=lambda: {**fleet.processes, **{f"data plane {name}": pid for name, pid in servers.pids.items()}},
        )


async def _engine(config: Config, engines: tuple[RpcClient, ...]) -> WorkerInfo:
    """What the engines are, which must be the same of all."""
    infos: list[WorkerInfo] = [await engine.call(INFO, Empty()) for engine in engines]
    if len({(i.max_model_len, i.vocab_size) for i in infos}) > 1:
        raise ModelMismatch(f"the generation workers serve different models: {infos}")
    limit = infos[0].max_model_len
    if config.rollout.max_tokens >= limit:
        raise ModelMismatch(
            f"rollout.max_tokens is {config.rollout.max_tokens}, but the engine holds {limit} tokens, prompt included: "
            "lower rollout.max_tokens, or raise generation.max_model_len"
        )
    return infos[0]


@asynccontextmanager
async def _watched(servers: Servers, deaths: Deaths) -> AsyncGenerator[None]:
    """The death of a server ends the scope with its error."""
    async with anyio.create_task_group() as tg:
        tg.start_soon(deaths.watch, servers.wait)
        yield
        tg.cancel_scope.cancel()


async def _close(plane: DataPlane) -> None:
    with anyio.CancelScope(shield=True):
        await plane.aclose()
