"""What it brings to generate and train at the same time: step time of asynchronous runs and of a synchronous one.

    python -m benchmarks.async_speedup [--steps 24] [--seed 0]

The controller's own pumps, gate, ledger, buffer, sampler and finalizers run on fakes with a virtual clock: engines that
have room for so many requests and emit a token of each in a fixed time, with heavy-tailed completion lengths (log-normal,
sigma 1, cut at sixteen times the median), and a trainer that is given as long for all steps as the engines need to play all
of their rollouts, stragglers included. Both are measured by themselves: generation as the step time of a run whose trainer
takes no time and that generates nothing ahead, training as what the trainer computes. The bound is
`max(generation, training)`.

Synchronous is `max_staleness: 0`: a step's rollouts, then its training. The first steps, which fill the pipeline, and the
last ones, for which nothing is generated ahead any more, are left out. The last line is JSON: `speedup` and `over_bound`
(step time over the bound, less 1), the worse of staleness 1 and 2 each.
"""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import dataclass
from statistics import mean

from controller.config.schema import (
    Config,
    EnvironmentConfig,
    GenerationConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
)
from controller.reporting.step_report import StepReport
from tests.fakes.clock import run_virtually
from tests.fakes.engine import heavy_tailed
from tests.fakes.environment import Talker
from tests.fakes.house import Speed, open_house

GROUPS, GROUP_SIZE = 32, 8
WORKERS, PLACES = 4, 8
MAX_TOKENS, MEDIAN_TOKENS = 1024, 64
TOKEN_S = 0.02
LEFT_OUT = 4
"""Steps at the beginning and at the end."""


PROMPT_TOKENS = 14
"""Of the talker's questions, with what the template adds."""


@dataclass(frozen=True)
class Steps:
    """Means of a run's steps."""

    seconds: float
    tokens: float
    """That the trainer computes, prompts included."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and completion lengths")
    arguments = parser.parse_args()
    steps, seed = arguments.steps, arguments.seed
    logging.disable(logging.WARNING)
    alone = measure(0, 0.0, steps=steps, seed=seed)
    token_s = alone.seconds / alone.tokens
    print(f"generation alone: {alone.seconds:.2f} s a step; the trainer is given as much", flush=True)
    synchronous = measure(0, token_s, steps=steps, seed=seed)
    print(f"synchronous: {synchronous.seconds:.2f} s a step", flush=True)
    speedups: list[float] = []
    excesses: list[float] = []
    for staleness in (1, 2):
        run = measure(staleness, token_s, steps=steps, seed=seed)
        bound = max(alone.seconds, run.tokens * token_s)
        speedups.append(synchronous.seconds / run.seconds)
        excesses.append(run.seconds / bound - 1)
        print(
            f"max_staleness {staleness}: {run.seconds:.2f} s a step, {speedups[-1]:.2f} times as fast; "
            f"{excesses[-1]:+.1%} to the bound of {bound:.2f} s",
            flush=True,
        )
    print(json.dumps({"speedup": round(min(speedups), 3), "over_bound": round(max(excesses), 4)}))


def measure(staleness: int, trained_token_s: float, *, steps: int, seed: int) -> Steps:
    """A run, on the virtual clock."""
    speed = Speed(token=TOKEN_S, length=heavy_tailed(MEDIAN_TOKENS), trained_token=trained_token_s, finish=0.0)
    config = Config(
        run=RunConfig(dir="runs/async-speedup", steps=steps, seed=seed),
        model=ModelConfig(path="models/none"),
        environment=EnvironmentConfig(name="talker"),
        rollout=RolloutConfig(
            groups_per_step=GROUPS, group_size=GROUP_SIZE, max_tokens=MAX_TOKENS, max_staleness=staleness
        ),
        generation=GenerationConfig(workers=WORKERS, max_batch=PLACES),
        training=TrainingConfig(max_tokens_per_microbatch=65536),
    )
    talker = Talker(steps * GROUPS * 2, turns=1, think_s=0.0, seed=seed)
    reports = run_virtually(_reports, config, talker, speed)[LEFT_OUT:-LEFT_OUT]
    return Steps(
        seconds=mean(report.seconds for report in reports),
        tokens=mean(report.completion_tokens + report.rollouts * PROMPT_TOKENS for report in reports),
    )


async def _reports(config: Config, talker: Talker, speed: Speed) -> list[StepReport]:
    async with open_house(config, talker, speed=speed, remember=False) as house:
        await house.play()
        if house.error is not None:
            raise house.error
        return house.observer.reports


if __name__ == "__main__":
    main()
