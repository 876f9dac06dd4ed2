"""Whether a rollout that machinery lost is played again: a number of times each, and no endless burning of prompts.

Lost is a rollout that came to no good end because a call of it got no answer in spite of all attempts. What failed through
its own fault (a refused request, a slow answer, custody that cannot be proven) is never played again.
"""

from __future__ import annotations

import logging

from controller.config.schema import FailuresConfig

logger = logging.getLogger(__name__)


class MachineryFails(Exception):
    """Rollout after rollout was lost. The message says why, and what to look at."""


class RedispatchBudget:
    """Counts over the whole run: `lost` rollouts, and those of them that were `again` played."""

    def __init__(self, config: FailuresConfig) -> None:
        self._config = config
        self._in_a_row = 0
        self.lost = 0
        self.again = 0

    def played(self) -> None:
        """A rollout was played to its end."""
        self._in_a_row = 0

    def lose(self, rollout_id: str, attempt: int, why: str) -> bool:
        """The rollout's `attempt`-th playing was lost; whether it is to be played again.

        Raises MachineryFails when too many were lost in a row.
        """
        self.lost += 1
        self._in_a_row += 1
        if self._in_a_row >= self._config.max_lost_in_a_row:
            raise MachineryFails(
                f"{self._in_a_row} rollouts in a row were lost (failures.max_lost_in_a_row). The last one: {why}"
            )
        if attempt >= self._config.rollout_attempts:
            logger.warning("rollout %s was lost, and is not played a time more than %d: %s", rollout_id, attempt, why)
            return False
        if self.again >= self._config.max_lost:
            logger.warning("rollout %s was lost, and failures.max_lost is used up: %s", rollout_id, why)
            return False
        self.again += 1
        logger.warning("rollout %s was lost and is played again: %s", rollout_id, why)
        return True
