"""How often an environment may fail: at a few prompts that it cannot cope with, but not at each, and not from the start.

Such a failure belongs to the prompt: the rollout becomes a placeholder, and is never played again.
"""

from __future__ import annotations

import logging

from controller.config.schema import FailuresConfig

logger = logging.getLogger(__name__)


class EnvironmentBudget:
    """Counts over the whole run. An environment that fails before any rollout was played to its end is simply broken."""

    def __init__(self, config: FailuresConfig) -> None:
        self._limit = config.max_failed
        self._works = False
        self.failed = 0

    def played(self) -> None:
        """A rollout was played to its end."""
        self._works = True

    def spend(self, failure: str, *, refused: bool) -> str:
        """The environment failed; why that ends the run, if it does. `refused`: because a call of it was."""
        if not self._works and not refused:
            return "no rollout was played to its end before it"
        if self.failed >= self._limit:
            return f"failures.max_failed {self._limit} is used up"
        self.failed += 1
        logger.warning("%s; it is a placeholder", failure)
        return ""
