"""Metadata of rollouts and prompt groups as the controller holds it: ids, lengths, rewards, versions. Never tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from msgspec import Struct

from ledger.reasons import Reason
from workers.environments.base import Prompt, Tokens

if TYPE_CHECKING:  # It brings numpy, for which a check of a configuration has no use.
    from ledger.receipts import Receipt


class PlayedRollout(Struct, frozen=True, kw_only=True):
    """One rollout that its environment has finished and scored."""

    rollout_id: str
    reward: float
    metrics: Mapping[str, float]
    failure: Reason | None = None
    """Set when the rollout did not end by itself; it then becomes a placeholder."""
    detail: str = ""
    """Of the failure, for people."""
    tokens: Tokens | None = None
    """What the environment returned, when token capture is off."""
    attempts_lost: bool = False
    """Attempts of its calls were given up, and may have staged rows that no call names."""
    lost: tuple[Receipt, ...] = ()
    """The rollouts that it was played in place of, which are aborted."""


class SampleRow(Struct, frozen=True, kw_only=True):
    """A row in the train partition."""

    key: str
    length: int
    loss_tokens: int


class TrainSample(Struct, frozen=True, kw_only=True):
    """One rollout after verification. A placeholder (no rows) keeps its real reward but is never trained."""

    rollout_id: str
    reward: float
    metrics: Mapping[str, float]
    rows: tuple[SampleRow, ...] = ()
    """One, unless every conversation of a rollout is trained; no token is a loss token of two."""
    truncated: bool = False
    """Its last call was cut by a length limit."""
    oldest_version: int = 0
    """Oldest weight version among its loss tokens."""
    proven: bool = True
    """False when the environment returned the tokens itself."""
    reason: Reason | None = None
    """Why it is a placeholder."""
    generated: int = 0
    """Tokens that its answered calls generated, trained or not."""

    @property
    def valid(self) -> bool:
        return bool(self.rows)

    @property
    def keys(self) -> list[str]:
        return [row.key for row in self.rows]

    @property
    def loss_tokens(self) -> int:
        return sum(row.loss_tokens for row in self.rows)


class FinalizationRequest(Struct, frozen=True, kw_only=True):
    """What the rollout pump hands to the finalizer group: a played group, without tokens."""

    group_id: str
    rollouts: tuple[PlayedRollout, ...]
    """Empty for a group that was given up while it was played."""
    aborted: str = ""
    """Why it was given up."""
    evaluation: int | None = None
    """Of a held-out group, which is verified and never published: the steps done before its evaluation."""


class PromptGroup(Struct, frozen=True, kw_only=True):
    """A prompt group at dispatch."""

    group_id: str
    prompt: Prompt
    start_version: int
    """The weight version served when it was dispatched."""
    rollout_ids: tuple[str, ...]


def metric_means(samples: Sequence[TrainSample]) -> dict[str, float | None]:
    """Mean of each environment metric over the rollouts that gave it."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: fmean(v) for name, v in values.items()}
