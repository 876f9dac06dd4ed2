"""Random fault schedules: what kind of run it is, what breaks in it and when. A seed gives the same schedule for ever."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal, get_args

from controller.config.schema import (
    Config,
    DataPlaneConfig,
    EnvironmentConfig,
    FailuresConfig,
    FleetConfig,
    GenerationConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TokenCaptureConfig,
    TrainingConfig,
    WatchdogConfig,
    WeightSyncConfig,
)
from workers.training.api import LossSpec

Kind = Literal[
    "kill worker",
    "freeze worker",
    "slow worker",
    "wedge engine",
    "engine dies",
    "engine forgets weights",
    "engine refuses weights",
    "replies get lost",
    "replies are garbage",
    "replies name other tokens",
    "logprobs are not finite",
    "worker does not start",
    "slow trainer",
    "freeze trainer",
    "kill trainer",
    "trainer's replies get lost",
    "slow storage",
    "freeze storage",
    "kill storage",
    "staged rows are altered",
    "staged rows get lost",
    "reads fail",
    "puts fail",
    "clears fail",
    "environment sleeps",
    "environment raises",
]
NOTHING = frozenset({"NothingTrainable"})
ENDS: dict[Kind, frozenset[str]] = {
    "engine refuses weights": frozenset({"RemoteError", "FleetLost"}),
    "worker does not start": frozenset({"FleetLost"}),
    "replies get lost": frozenset({"FleetLost"}),
    "replies are garbage": frozenset({"FleetLost"}),
    "logprobs are not finite": NOTHING,
    "replies name other tokens": NOTHING,
    "staged rows are altered": NOTHING,
    "staged rows get lost": NOTHING,
    "reads fail": NOTHING,
    "puts fail": NOTHING,
    "freeze trainer": frozenset({"RpcTimeout"}),
    "trainer's replies get lost": frozenset({"WorkerUnreachable"}),
    "kill trainer": frozenset({"WorkerDied"}),
    "freeze storage": frozenset({"RemoteError", "DataPlaneTimeout", "NothingTrainable"}),
    "kill storage": frozenset({"DataPlaneDown"}),
    "environment raises": frozenset({"RolloutError", *NOTHING}),
}
"""What may end a run, with which errors; it survives every other fault, and most times these too."""
NEVER_BY_HALVES: frozenset[Kind] = frozenset(
    {
        "replies get lost",
        "replies are garbage",
        "replies name other tokens",
        "logprobs are not finite",
        "staged rows are altered",
        "staged rows get lost",
        "reads fail",
        "puts fail",
    }
)
"""Which end a run only if they hit everything."""
DEADLY: tuple[Kind, ...] = (
    "freeze trainer",
    "trainer's replies get lost",
    "kill trainer",
    "freeze storage",
    "kill storage",
)
HARMLESS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind not in DEADLY)


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: Kind
    seconds: float
    """How long it lasts, where it does not end at once."""
    target: int
    """Which generation worker."""
    share: float
    """Of replies, rows or reads that are hit."""


@dataclass(frozen=True)
class Schedule:
    seed: int
    config: Config
    turns: int
    naughty: float
    faults: tuple[Fault, ...] = field(default=())

    @property
    def may_end_with(self) -> frozenset[str]:
        return frozenset(
            name
            for fault in self.faults
            if fault.share == 1.0 or fault.kind not in NEVER_BY_HALVES
            for name in ENDS.get(fault.kind, frozenset())
        )

    def __str__(self) -> str:
        lines = [f"chaos schedule {self.seed}: {self.config.rollout}, {self.config.generation.workers} workers"]
        lines += [
            f"  at {f.at_s:6.2f} s: {f.kind} (worker {f.target}, {f.seconds:.1f} s, share {f.share:.2f})"
            for f in self.faults
        ]
        return "\n".join(lines)


def schedule_of(seed: int) -> Schedule:
    rng = random.Random(f"chaos {seed}")
    workers = rng.randint(1, 4)
    kinds = [rng.choice(HARMLESS) for _ in range(rng.randint(0, 6))]
    if rng.random() < 0.25:
        kinds.append(rng.choice(DEADLY))
    faults = sorted(
        (
            Fault(
                at_s=rng.uniform(0, 20),
                kind=kind,
                seconds=rng.choice((0.5, 3.0, 8.0, 25.0)),
                target=rng.randrange(workers),
                share=rng.choice((0.1, 0.3, 1.0)),
            )
            for kind in kinds
        ),
        key=lambda fault: fault.at_s,
    )
    return Schedule(seed, _config(rng, workers), rng.randint(1, 3), rng.choice((0.0, 0.3)), tuple(faults))


def _config(rng: random.Random, workers: int) -> Config:
    sampler = rng.choice(("windowed", "windowed", "in_order", "ready_first", "weight_fifo"))
    over_sampling = rng.choice((1.0, 1.5)) if sampler == "windowed" else 1.0
    return Config(
        run=RunConfig(dir="runs/chaos", steps=rng.randint(3, 5), seed=rng.randrange(1000)),
        model=ModelConfig(path="models/none"),
        environment=EnvironmentConfig(name="talker"),
        rollout=RolloutConfig(
            groups_per_step=rng.randint(2, 4),
            group_size=rng.randint(2, 4),
            max_staleness=rng.randint(0, 2),
            sampler=sampler,
            over_sampling=over_sampling,
            freshest_first=over_sampling > 1 and rng.random() < 0.5,
            staleness_from=rng.choice(("dispatch", "oldest_token")) if sampler == "windowed" else "dispatch",
            min_step_batch_fraction=rng.choice((1.0, 0.5)),
            max_tokens=48,
            timeout_s=60.0,
            call_timeout_s=25.0,
        ),
        generation=GenerationConfig(workers=workers, max_batch=rng.choice((4, 64))),
        training=TrainingConfig(
            loss=LossSpec(old_logprobs=rng.choice(("rollout", "policy"))),
            max_tokens_per_microbatch=rng.choice((128, 8192)),
            step_timeout_s=20.0,
        ),
        dataplane=DataPlaneConfig(timeout_s=5.0),
        weight_sync=WeightSyncConfig(timeout_s=10.0),
        token_capture=TokenCaptureConfig(
            trajectory=rng.choice(("terminal", "terminal", "branches")),
            on_failure=rng.choice(("placeholder", "placeholder", "drop_group")),
        ),
        watchdog=WatchdogConfig(stall_after_s=300.0),
        fleet=FleetConfig(
            probe_every_s=1.0, probe_timeout_s=2.0, stalled_after_s=8.0, restart_after_s=10.0, max_restarts=8
        ),
        failures=FailuresConfig(backoff_s=0.1, max_backoff_s=2.0),
    )
