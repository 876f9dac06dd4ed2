"""What a configuration asks of the generation engine: is it installed, and does it know the arguments?"""

from __future__ import annotations

from collections.abc import Iterator

from controller.config.problems import Problem
from controller.config.schema import Config
from workers.generation.vllm_args import LOWEST_TEMPERATURE, argument_problems, is_installed


def engine(config: Config) -> Iterator[Problem]:
    """vLLM is looked for, not imported."""
    generation = config.generation
    if generation.engine != "vllm":
        if generation.vllm:
            yield Problem(
                path="generation.vllm",
                what=f"has no effect with generation.engine {generation.engine}",
                allowed="nothing, or generation.engine: vllm",
                warning=True,
            )
        return
    if not is_installed():
        yield Problem(
            path="generation.engine",
            what="vllm is not installed",
            remedy="`make vllm` installs it into .venv; the README says more under `With vLLM`",
        )
    for name, what, allowed, nearest in argument_problems(generation.vllm):
        yield Problem(
            path=f"generation.vllm.{name}",
            what=what,
            allowed=allowed,
            nearest=None if nearest is None else f"generation.vllm.{nearest}",
        )
    for section, temperature in (
        ("rollout", config.rollout.temperature),
        ("evaluation", config.evaluation.temperature),
    ):
        if temperature is not None and 0 < temperature < LOWEST_TEMPERATURE:
            yield Problem(
                path=f"{section}.temperature",
                what=f"{temperature:g} with generation.engine vllm: it would sample at {LOWEST_TEMPERATURE} instead",
                allowed=f"0 (greedy), or >= {LOWEST_TEMPERATURE}",
            )
