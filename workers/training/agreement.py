"""How far the trainer's logprobs are from the sampler's, token by token, over one optimizer step.

Both compute the same distribution, but for other kernels, other precision, and the steps between the sampler's weights and
the trainer's. Tokens of age 0 were sampled with the very weights that the trainer has: what they differ by is numerics, or a
fault. Greater ages add how far the policy has moved since.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from workers.training.api import RATIO_QUANTILES, Agreement
from workers.training.losses import MAX_LOG_RATIO

MAX_AGE = 8
"""Ages from here on are one class."""

Floats = npt.NDArray[np.float64]


class AgreementMeter:
    """Takes the differences of a step's microbatches. Memory: 12 bytes per loss token of the step."""

    def __init__(self) -> None:
        self._differences: list[npt.NDArray[np.floating]] = []
        self._ages: list[npt.NDArray[np.int64]] = []

    def add(self, policy: Tensor, rollout: Tensor, ages: Tensor) -> None:
        """Logprobs of N loss tokens under trainer and sampler, nats, [N]; and how many steps old their weights are."""
        self._differences.append((policy.detach() - rollout.to(policy.dtype)).cpu().numpy())
        self._ages.append(ages.clamp(max=MAX_AGE).cpu().numpy())

    def measure(self) -> tuple[Agreement, dict[int, Agreement]]:
        """Of all tokens, and of those of each age that there is. At least one token was added."""
        differences = np.concatenate(self._differences).astype(np.float64)
        ages = np.concatenate(self._ages)
        present = cast("list[int]", np.unique(ages).tolist())
        return _agreement(differences), {age: _agreement(differences[ages == age]) for age in present}


def _agreement(difference: Floats) -> Agreement:
    log_ratio = difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    size = np.abs(difference)
    quantiles = np.exp(np.quantile(log_ratio, RATIO_QUANTILES))
    return Agreement(
        tokens=difference.size,
        difference_mean=float(size.mean()),
        difference_max=float(size.max()),
        kl=float((np.expm1(log_ratio) - log_ratio).mean()),
        ratio_quantiles=tuple(cast("list[float]", quantiles.tolist())),
    )
