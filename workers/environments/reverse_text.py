"""Spell a random word backwards: a task with a dense reward that a model of 0.3 M parameters can learn in seconds."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from itertools import count

from workers.environments.base import Prompt, RolloutContext, RolloutResult
from workers.environments.held_out import Split


class ReverseText:
    """Endless prompts `Reverse: <word>` with words of `min_length` to `max_length` random lower-case letters.

    `held_out_share` of all words is set aside for evaluation.

    The reward is `position_match` with the reversed word; the metric `exact` is 1 for a faultless answer.
    """

    def __init__(self, min_length: int = 4, max_length: int = 8, held_out_share: float = 0.0) -> None:
        if not 1 <= min_length <= max_length:
            raise ValueError(
                f"1 <= min_length <= max_length is needed; got min_length={min_length}, max_length={max_length}"
            )
        self._min_length = min_length
        self._max_length = max_length
        self._split = Split(held_out_share)

    def prompts(self, seed: int) -> Iterator[Prompt]:
        return self._split.trained(self._all(seed), _word)

    def held_out(self, seed: int) -> Iterator[Prompt]:
        return self._split.held_out(self._all(seed), _word)

    def _all(self, seed: int) -> Iterator[Prompt]:
        rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
        for index in count():
            length = rng.randint(self._min_length, self._max_length)
            word = "".join(rng.choices(string.ascii_lowercase, k=length))
            yield Prompt(id=f"reverse_text-{seed}-{index}", data={"word": word})

    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        word = _word(prompt)
        answer = await ctx.chat([{"role": "user", "content": question(word)}])
        target = word[::-1]
        return RolloutResult(
            reward=position_match(answer.text, target), metrics={"exact": float(answer.text == target)}
        )


def _word(prompt: Prompt) -> str:
    return prompt.data["word"]


def question(word: str) -> str:
    return f"Reverse: {word}"


def position_match(answer: str, target: str) -> float:
    """The share of positions at which both have the same character, over the longer one's length: in [0, 1]."""
    length = max(len(answer), len(target))
    return sum(a == t for a, t in zip(answer, target, strict=False)) / length if length else 1.0
