"""Advantages of a prompt group from its rewards and a valid mask. A masked sample never enters a baseline.

Shapes: `rewards` float64 [G], `valid` bool [G] -> advantages float64 [G], 0 where not valid. A group with fewer than
two valid samples has no baseline: its advantages are 0.
"""

from __future__ import annotations

import random
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Estimator: TypeAlias = Literal["grpo", "dr_grpo", "rloo"]
Rewards: TypeAlias = npt.NDArray[np.float64]

EPS = 1e-4
"""Added to the standard deviation, so that nearly equal rewards do not blow up."""


def coin_flips(seed: int, group_id: str, rollouts: int) -> Rewards:
    """Rewards of 0 or 1, [rollouts], that have nothing to do with what was played; a group's are the same at each call."""
    rng = random.Random(f"{seed}/{group_id}")  # noqa: S311 - reproducible, not secret
    return np.array([rng.getrandbits(1) for _ in range(rollouts)], dtype=np.float64)


def group_advantages(estimator: Estimator, rewards: Rewards, valid: npt.NDArray[np.bool_]) -> Rewards:
    """Advantages of one group.

    grpo: (r - mean) / (std + EPS), std with n - 1 (Shao et al. 2024, DeepSeekMath).
    dr_grpo: r - mean, without the division (Liu et al. 2025, Understanding R1-Zero-like training).
    rloo: r - mean of the others = n / (n - 1) * (r - mean) (Ahmadian et al. 2024, Back to Basics).
    """
    if rewards.shape != valid.shape or rewards.ndim != 1:
        raise ValueError(f"rewards {rewards.shape} and valid {valid.shape} must be 1-D and of equal length")
    out = np.zeros_like(rewards)
    n = int(valid.sum())
    if n < 2:
        return out
    kept = rewards[valid]
    centred = kept - kept.mean()
    match estimator:
        case "grpo":
            out[valid] = centred / (kept.std(ddof=1) + EPS)
        case "dr_grpo":
            out[valid] = centred
        case "rloo":
            out[valid] = centred * (n / (n - 1))
    return out
