"""An environment that talks for some turns, thinks in between, and does on the way what agents do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import anyio

from ledger.records import Message
from workers.environments.base import Prompt, RolloutContext, RolloutResult


class Talker:
    """Rollouts of 1 to `turns` calls; their course depends on `seed`, the prompt and the rollout alone.

    `naughty` is the share of rollouts that do something which costs custody: edit what was said, ask twice, stop in between.
    """

    def __init__(
        self, prompts: int, *, turns: int = 3, think_s: float = 0.1, naughty: float = 0.0, seed: int = 0
    ) -> None:
        self.playing = 0
        self.asleep_until: float | None = None
        """No rollout ends before that time."""
        self.raises: Callable[[], bool] = lambda: False
        """Asked before each turn, whether the rollout raises there."""
        self._prompts = prompts
        self._turns = turns
        self._think_s = think_s
        self._naughty = naughty
        self._seed = seed

    def prompts(self, seed: int) -> Iterator[Prompt]:
        for n in range(self._prompts):
            yield Prompt(id=f"p{n}", data=n)

    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        self.playing += 1
        try:
            return await self._play(ctx, random.Random(f"{self._seed}/{ctx.rollout_id}"), prompt)
        finally:
            self.playing -= 1

    async def _play(self, ctx: RolloutContext, rng: random.Random, prompt: Prompt) -> RolloutResult:
        talk = [Message(role="user", content=f"question {prompt.data}")]
        naughty = rng.random() < self._naughty
        last = ""
        for turn in range(rng.randint(1, self._turns)):
            if self.raises():
                raise ValueError("it raised, as it was told")
            answer = await ctx.chat(talk)
            last = answer.text
            if naughty and rng.random() < 0.3:
                # The same question once more: two answers, of which only the last is gone on with.
                answer = await ctx.chat(talk)
            if naughty and rng.random() < 0.3:
                talk = [Message(role="user", content=f"{talk[0].content}, and again"), *talk[1:]]
            await anyio.sleep(rng.expovariate(1 / self._think_s) if self._think_s else 0)
            talk = [*talk, answer.message, Message(role="user", content=f"and then, {turn}?")]
        while self.asleep_until is not None and anyio.current_time() < self.asleep_until:
            await anyio.sleep(self.asleep_until - anyio.current_time())
        return RolloutResult(reward=rng.random(), metrics={"turns": float(len(talk))}, scored=last or None)
