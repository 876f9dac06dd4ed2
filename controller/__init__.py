"""The loop: pumps, finalizer group, replay buffer, samplers, configuration, command line.

Importing this package is cheap: torch and what brings it load in workers, or when `Controller` is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.config.schema import Config
from workers.environments.base import Environment, Prompt, RolloutContext, RolloutResult

if TYPE_CHECKING:
    from controller.config.load import load_config
    from controller.controller import Controller

__all__ = ["Config", "Controller", "Environment", "Prompt", "RolloutContext", "RolloutResult", "load_config"]


def __getattr__(name: str) -> Any:
    if name == "Controller":
        from controller.controller import Controller

        return Controller
    if name == "load_config":
        from controller.config.load import load_config

        return load_config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
