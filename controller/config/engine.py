"""What a configuration asks of the generation engine: is it installed, and does it know the arguments?"""

from __future__ import annotations

from collections.abc import Iterator

from controller.config.problems import Problem
from controller.config.schema import GenerationConfig
from workers.generation.vllm_args import argument_problems, is_installed


def engine(config: GenerationConfig) -> Iterator[Problem]:
    """vLLM is looked for, not imported."""
    if config.engine != "vllm":
        if config.vllm:
            yield Problem(
                path="generation.vllm",
                what=f"has no effect with generation.engine {config.engine}",
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
    for name, what, allowed, nearest in argument_problems(config.vllm):
        yield Problem(
            path=f"generation.vllm.{name}",
            what=what,
            allowed=allowed,
            nearest=None if nearest is None else f"generation.vllm.{nearest}",
        )
