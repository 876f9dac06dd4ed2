"""An environment of your own: reverse a word, with a second chance after a mistake.

An environment says what the prompts are and plays one rollout of one prompt. It talks to the model in messages and never
sees a token. Start this one with

    python -m controller --config examples/my_environment.yaml
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

from workers.environments.base import Prompt, RolloutContext, RolloutResult


class SecondChance:
    """Up to `attempts` answers per word. The last one counts, and each attempt before it costs the factor `discount`.

    The arguments come from the configuration's `environment.args` and are checked against these annotations.
    """

    def __init__(self, attempts: int = 2, discount: float = 0.8) -> None:
        # Raise for what cannot work: the message is shown before any process is started.
        if attempts < 1:
            raise ValueError(f"attempts: at least 1; got {attempts}")
        self._attempts = attempts
        self._discount = discount

    def prompts(self, seed: int) -> Iterator[Prompt]:
        # Only `seed` may decide what comes, and in which order: a resumed run skips what the first one has used.
        rng = random.Random(seed)
        for index in count():
            word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 6)))
            # `data` goes into checkpoints, so it holds JSON-like values only.
            yield Prompt(id=f"word-{index}", data={"word": word})

    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        word: str = prompt.data["word"]
        # Rollouts share the object, so what belongs to one of them lives in local variables.
        messages: list[Any] = [{"role": "user", "content": f"Reverse: {word}"}]
        attempts = 0
        while True:
            attempts += 1
            answer = await ctx.chat(messages)
            share = _share_right(answer.text, word[::-1])
            if share == 1.0 or attempts == self._attempts:
                break
            # Appending to what the model said continues its exact tokens; all of its answers will be trained.
            messages += [answer.message, {"role": "user", "content": f"Reverse: {word}"}]
        return RolloutResult(
            reward=share * self._discount ** (attempts - 1),
            # Averaged over the step; they appear beside the reward in metrics.jsonl and TensorBoard.
            metrics={"solved": float(share == 1.0), "attempts": float(attempts)},
        )


def _share_right(answer: str, target: str) -> float:
    """A reward for parts of the answer: with all or nothing, a group of failures would teach nothing."""
    return sum(a == t for a, t in zip(answer, target, strict=False)) / max(len(answer), len(target))
