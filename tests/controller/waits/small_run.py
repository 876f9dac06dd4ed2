"""A whole run on fakes and the real clock, with a real sentinel, whose environment proves nothing and is over at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import anyio.lowlevel
import msgspec

from controller.config.schema import Config
from controller.sentinel.sentinel import Sentinel
from tests.fakes.house import FakeHouse, Speed, open_house
from workers.environments.base import Prompt, RolloutContext, RolloutResult, Tokens


class Plays:
    """Rollouts that are over at once; their tokens are the environment's own."""

    def prompts(self, seed: int) -> Iterator[Prompt]:
        return (Prompt(id=f"p{i}") for i in count())

    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        await anyio.lowlevel.checkpoint()
        tokens = Tokens(input_ids=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0.0, -1.0, -1.0], weight_versions=[0, 0, 0])
        return RolloutResult(reward=1.0, tokens=tokens)


def small_config(folder: Path, **sections: Any) -> Config:
    document: dict[str, Any] = {
        "run": {"dir": str(folder), "steps": 1_000_000},
        "model": {"path": "models/none"},
        "environment": {"name": "own"},
        "rollout": {"groups_per_step": 2, "group_size": 2, "max_staleness": 1},
        "dataplane": {"timeout_s": 4.0},
        "token_capture": {"enabled": False},
        "watchdog": {"stall_after_s": 2.0},
        "fleet": {"probe_every_s": 0.1, "probe_timeout_s": 0.2},
    }
    return msgspec.convert(document | sections, Config)


@asynccontextmanager
async def small_run(folder: Path, environment: Any = None, **sections: Any) -> AsyncGenerator[FakeHouse]:
    """A run that is ready: `await house.run.pump()` trains on and on. `sections` replace the configuration's."""
    with Sentinel(report_over_ms=60_000) as sentinel:
        speed = Speed(trained_token=0.0, finish=0.0, load=0.0)
        config = small_config(folder, **sections)
        async with open_house(config, environment or Plays(), speed=speed, sentinel=sentinel) as house:
            yield house
