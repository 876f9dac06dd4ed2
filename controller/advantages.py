"""Advantages of a step's samples from their rewards and a valid mask. A masked sample never enters a baseline, nor a
deviation.

Shapes, for each prompt group: `rewards` float64 [G], `valid` bool [G], `lengths` int [G] (loss tokens) -> advantages float64
[G], 0 where not valid. A baseline of fewer than two valid samples is none: the advantages are 0.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Estimator: TypeAlias = Literal["grpo", "dr_grpo", "rloo", "opo", "reinforce++", "reinforce++_baseline"]
Rewards: TypeAlias = npt.NDArray[np.float64]

EPS = 1e-4
"""Added to the standard deviation, so that nearly equal rewards do not blow up."""


def coin_flips(seed: int, group_id: str, rollouts: int) -> Rewards:
    """Rewards of 0 or 1, [rollouts], that have nothing to do with what was played; a group's are the same at each call."""
    rng = random.Random(f"{seed}/{group_id}")  # noqa: S311 - reproducible, not secret
    return np.array([rng.getrandbits(1) for _ in range(rollouts)], dtype=np.float64)


@dataclass(frozen=True)
class Group:
    """One prompt group's samples."""

    rewards: Rewards
    valid: npt.NDArray[np.bool_]
    lengths: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        shapes = (self.rewards.shape, self.valid.shape, self.lengths.shape)
        if self.rewards.ndim != 1 or len(set(shapes)) > 1:
            raise ValueError(f"rewards, valid and lengths must be 1-D and of equal length, not of {shapes}")


def step_advantages(estimator: Estimator, groups: Sequence[Group]) -> list[Rewards]:
    """Advantages of each group of a step; r are its valid rewards, n their number.

    grpo: (r - mean) / (std + EPS), std with n - 1 (Shao et al. 2024, DeepSeekMath).
    dr_grpo: r - mean, without the division (Liu et al. 2025, Understanding R1-Zero-like training).
    rloo: r - mean of the others = n / (n - 1) * (r - mean) (Ahmadian et al. 2024, Back to Basics).
    opo: r - sum(length * r) / sum(length), the baseline of least gradient variance where the gradient's size grows with the
    length (Hao et al. 2025, On-Policy RL with Optimal Reward Baseline).
    reinforce++: (r - mean) / (std + EPS), mean and std over all valid samples of the step; its KL penalty in the reward is
    left to the loss (Hu 2025, REINFORCE++).
    reinforce++_baseline: r - the group's mean, then divided by std + EPS of that over the step (ibid., with several samples
    per prompt).
    """
    match estimator:
        case "reinforce++":
            return _normalised([(group, group.rewards.copy(), group.valid) for group in groups], centre=True)
        case "reinforce++_baseline":
            parts = [(group, _of_group("dr_grpo", group), _with_baseline(group)) for group in groups]
            return _normalised(parts, centre=False)
        case _:
            return [_of_group(estimator, group) for group in groups]


def _of_group(estimator: Estimator, group: Group) -> Rewards:
    out = np.zeros_like(group.rewards)
    valid = group.valid
    n = int(valid.sum())
    if n < 2:
        return out
    kept = group.rewards[valid]
    centred = kept - kept.mean()
    match estimator:
        case "grpo":
            out[valid] = centred / (kept.std(ddof=1) + EPS)
        case "rloo":
            out[valid] = centred * (n / (n - 1))
        case "opo":
            lengths = group.lengths[valid]
            # Of the centred ones, so that equal rewards give exactly nothing.
            out[valid] = centred - (lengths @ centred) / max(1, int(lengths.sum()))
        case _:
            out[valid] = centred
    return out


def _with_baseline(group: Group) -> npt.NDArray[np.bool_]:
    return group.valid & (group.valid.sum() >= 2)


def _normalised(parts: Sequence[tuple[Group, Rewards, npt.NDArray[np.bool_]]], *, centre: bool) -> list[Rewards]:
    """The values over their deviation in the whole step, and less their mean there when `centre`; 0 where not counted."""
    values = np.concatenate([values[counted] for _, values, counted in parts]) if parts else np.zeros(0)
    if len(values) < 2:
        return [np.zeros_like(group.rewards) for group, _, _ in parts]
    mean, scale = values.mean() if centre else 0.0, values.std(ddof=1) + EPS
    return [np.where(counted, (values - mean) / scale, 0.0) for _, values, counted in parts]
