"""The token sink stages one call's tokens as one row."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.errors import RowExists
from dataplane.memory import MemoryPlane
from dataplane.schema import STAGING, STAGING_COLUMNS
from dataplane.sink import TokenDelta, TokenSink

pytestmark = pytest.mark.anyio

DELTA = TokenDelta(
    token_ids=np.array([5, 6, 7]),
    token_mask=np.array([0, 1, 1], np.uint8),
    logprobs=np.array([0, -0.5, -0.25], np.float32),
    weight_versions=np.array([4, 4, 4]),
)


async def test_a_staged_delta_is_one_row_of_the_staging_partition() -> None:
    plane = MemoryPlane()
    await TokenSink(plane).stage("r/0-abcdef01", DELTA)
    [got] = await plane.get(STAGING, ["r/0-abcdef01"], STAGING_COLUMNS)
    for column in STAGING_COLUMNS:
        np.testing.assert_array_equal(got[column], getattr(DELTA, column), strict=True)


async def test_a_key_is_staged_once() -> None:
    sink = TokenSink(MemoryPlane())
    await sink.stage("r/0-abcdef01", DELTA)
    with pytest.raises(RowExists):
        await sink.stage("r/0-abcdef01", DELTA)
