"""Training from a program of your own: your environment object, your prompts, your rule for when to stop.

python examples/custom_training_script.py
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import anyio

from controller import Config, Controller, Prompt, RolloutContext, RolloutResult, load_config


class Reverse:
    """Reverse a word; only the faultless answer earns the second half of the reward."""

    def prompts(self, seed: int) -> Iterator[Prompt]:
        return easy_words_first(seed)

    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        word: str = prompt.data["word"]
        answer = await ctx.chat([{"role": "user", "content": f"Reverse: {word}"}])
        target = word[::-1]
        right = sum(a == t for a, t in zip(answer.text, target, strict=False)) / max(len(answer.text), len(target))
        exact = float(answer.text == target)
        return RolloutResult(reward=(right + exact) / 2, metrics={"exact": exact})


def easy_words_first(seed: int, harder_every: int = 128) -> Iterator[Prompt]:
    """A curriculum: words of four letters first, then up to eight."""
    rng = random.Random(seed)
    for index in count():
        longest = min(8, 4 + index // harder_every)
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(4, longest)))
        yield Prompt(id=f"word-{index}", data={"word": word})


async def train(config: Config, good_enough: float) -> None:
    # `prompts` could be left out here, since Reverse.prompts gives the same; it is how a data set of your own comes in.
    async with Controller(config, environment=Reverse(), prompts=easy_words_first(config.run.seed)) as controller:
        async for step in controller.steps():
            exact = step.metrics["environment/exact"]
            print(
                f"step {step.step}: reward {step.reward_mean:.3f}, {exact:.0%} of the words right, {step.seconds:.1f} s"
            )
            if step.step >= 10 and exact >= good_enough:
                print("good enough")
                break  # leaving the scope below ends the rollouts, writes a checkpoint and stops every process
    assert controller.summary is not None
    print(f"{controller.summary.status}; the run is in {config.run.dir}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--good-enough", type=float, default=0.5, help="share of words right at which to stop")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the config")
    args = parser.parse_args()
    quickstart = Path(__file__).with_name("quickstart.yaml")
    config = load_config(quickstart, ["run.dir=runs/custom", *args.set])
    anyio.run(train, config, args.good_enough, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
