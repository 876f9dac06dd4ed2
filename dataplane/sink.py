"""The token sink: stages one model call's tokens with one put."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataplane.plane import DataPlane
from dataplane.schema import STAGING


@dataclass(frozen=True)
class TokenDelta:
    """The tokens one model call added to its conversation: new prompt tokens, then generated tokens.

    All arrays are 1-D and of equal length. `token_ids` int64. `token_mask` uint8: 0 prompt, 1 generated.
    `logprobs` float32: natural log under the sampling distribution; 0 on prompt tokens.
    `weight_versions` int64: the weights that produced each token; on prompt tokens, those of the first generated token.
    """

    token_ids: npt.NDArray[np.int64]
    token_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    weight_versions: npt.NDArray[np.int64]


class TokenSink:
    """Stages deltas in the staging partition. A successful `stage` states that the tokens are kept."""

    def __init__(self, plane: DataPlane, *, timeout: float | None = None) -> None:
        self._plane = plane
        self._timeout = timeout

    async def stage(self, key: str, delta: TokenDelta) -> None:
        """Put one row under `key`.

        Raises the plane's errors, and then nothing is staged (or its outcome is unknown). A cancelled stage leaves the
        whole row or none of it.
        """
        row = {
            "token_ids": delta.token_ids,
            "token_mask": delta.token_mask,
            "logprobs": delta.logprobs,
            "weight_versions": delta.weight_versions,
        }
        await self._plane.put(STAGING, {key: row}, timeout=self._timeout)
