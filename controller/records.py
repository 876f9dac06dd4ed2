"""Metadata of rollouts and prompt groups as the controller holds it: ids, lengths, rewards, versions. Never tokens."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ledger.reasons import Reason
from workers.environments.base import Prompt


class PlayedRollout(Struct, frozen=True, kw_only=True):
    """One rollout that its environment has finished and scored."""

    rollout_id: str
    reward: float
    metrics: Mapping[str, float]
    failure: Reason | None = None
    """Set when the rollout did not end by itself; it then becomes a placeholder."""


class TrainSample(Struct, frozen=True, kw_only=True):
    """One rollout after verification. A placeholder (`key` None) keeps its real reward but is never trained."""

    rollout_id: str
    reward: float
    metrics: Mapping[str, float]
    key: str | None
    """Its row in the train partition."""
    length: int = 0
    loss_tokens: int = 0
    truncated: bool = False
    """Its last call was cut by a length limit."""
    oldest_version: int = 0
    """Oldest weight version among its generated tokens."""
    reason: Reason | None = None
    """Why it is a placeholder."""

    @property
    def valid(self) -> bool:
        return self.key is not None


class FinalizationRequest(Struct, frozen=True, kw_only=True):
    """What the rollout pump hands to the finalizer group: a played group, without tokens."""

    group_id: str
    rollouts: tuple[PlayedRollout, ...]


class PromptGroup(Struct, frozen=True, kw_only=True):
    """A prompt group at dispatch."""

    group_id: str
    prompt: Prompt
    start_version: int
    """The weight version served when it was dispatched."""
    rollout_ids: tuple[str, ...]
