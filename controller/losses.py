"""Which rollouts are lost to training, by length: what loses the long ones more often than the short ones biases a run.

Lost is what was played and not trained: placeholders, and the rollouts of groups that were dropped, evicted or aborted.
Lengths are tokens generated; for an aborted rollout those of its answered calls, of which there would have been more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from controller.records import TrainSample

_BINS_PER_OCTAVE = 8
DECILES = 10


class LossReport(Struct, frozen=True, kw_only=True):
    """Of one environment's rollouts since the run's process began."""

    environment: str
    played: int
    lost: int
    reasons: dict[str, int]
    """Lost rollouts by reason code, or by how their group ended."""
    shares: tuple[float, ...]
    """Share lost of the rollouts in each tenth by length, the shortest first; empty when none was played."""


class Losses:
    """Counts in bins of lengths, so that its size does not grow with the run."""

    def __init__(self, environment: str = "") -> None:
        self._environment = environment
        self._played: Counter[int] = Counter()
        self._lost: Counter[int] = Counter()
        self._reasons: Counter[str] = Counter()

    def played(self, samples: Iterable[TrainSample], dropped: str | None) -> None:
        """A group was finalized. `dropped`: why, if none of it is trained."""
        for sample in samples:
            reason = sample.reason or dropped
            self._played[_bin(sample.generated)] += 1
            if reason is not None:
                self._lose(sample.generated, reason)

    def evicted(self, samples: Iterable[TrainSample]) -> None:
        """A ready group grew too stale."""
        for sample in samples:
            if sample.valid:
                self._lose(sample.generated, "evicted")

    def aborted(self, generated: int) -> None:
        """A rollout was given up while it was played."""
        self._played[_bin(generated)] += 1
        self._lose(generated, "aborted")

    def report(self) -> LossReport:
        return LossReport(
            environment=self._environment,
            played=self._played.total(),
            lost=self._lost.total(),
            reasons=dict(self._reasons.most_common()),
            shares=self._shares(),
        )

    def metrics(self) -> dict[str, float]:
        """Shares lost since the run's process began: of all, and of each tenth by length, `tenth_01` the shortest."""
        shares = self._shares()
        total = {"share": self._lost.total() / self._played.total()} if shares else {}
        return {**total, **{f"tenth_{i:02d}": share for i, share in enumerate(shares, 1)}}

    def _lose(self, generated: int, reason: str) -> None:
        self._lost[_bin(generated)] += 1
        self._reasons[str(reason)] += 1

    def _shares(self) -> tuple[float, ...]:
        """A bin that lies in several tenths is divided among them."""
        total = self._played.total()
        if not total:
            return ()
        lost, below = [0.0] * DECILES, 0
        for at in sorted(self._played):
            count = self._played[at]
            for tenth in range(DECILES):
                start, end = total * tenth / DECILES, total * (tenth + 1) / DECILES
                inside = max(0.0, min(end, below + count) - max(start, below))
                lost[tenth] += self._lost[at] * inside / count
            below += count
        return tuple(min(1.0, part * DECILES / total) for part in lost)


def bias(shares: Sequence[float]) -> str:
    """What a person is told of it."""
    return f"{shares[0]:.1%} of the shortest tenth of the rollouts, {shares[-1]:.1%} of the longest"


def _bin(length: int) -> int:
    return math.floor(_BINS_PER_OCTAVE * math.log2(length)) + 1 if length > 0 else 0
