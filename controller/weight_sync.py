"""Weight sync, in two phases: the trainer publishes a version and the engines load it; only then is it called served.

An engine that fails or is late is taken out, and the version advances for the rest: what comes back later has to acknowledge
it first, so nothing is stamped with a version that was not loaded. Dispatch is held meanwhile; generation in flight goes on
and changes version between two tokens.

The trainer keeps what it published last, for workers and engines that are restarted.
"""

from __future__ import annotations

import time

from controller.generation_pool import GenerationPool
from controller.member import Weights
from controller.run_state import RunState
from controller.waiting import ENGINES, SYNC, TRAINER, Activities
from workers.rpc.client import RpcClient
from workers.training.api import PUBLISH_WEIGHTS, Publish, Published


class WeightSync:
    def __init__(
        self,
        *,
        trainer: RpcClient,
        pool: GenerationPool,
        state: RunState,
        activities: Activities,
        timeout_s: float,
    ) -> None:
        self._trainer = trainer
        self._pool = pool
        self._state = state
        self._activities = activities
        self._timeout_s = timeout_s
        self.last_seconds: float | None = None

    async def sync(self, version: int) -> None:
        """Bring the engines to `version`, the trainer's present weights. Raises the RPC's errors where the trainer fails, or
        when all engines refuse the file; `state.version` has then not moved.

        Cancelled in the middle, some engines may serve the new version already; `state.version` has not moved, and the
        tokens themselves carry the version that they were sampled under.
        """
        start = time.monotonic()
        with self._activities.doing(SYNC, f"publishing version {version}", on=TRAINER), self._state.hold_dispatch():
            published: Published = await self._trainer.call(
                PUBLISH_WEIGHTS, Publish(version=version), timeout=self._timeout_s
            )
            weights = Weights(version, published.address)
            with self._activities.doing(SYNC, f"loading version {version} into the engines", on=ENGINES):
                await self._pool.load_weights(weights, timeout=self._timeout_s)
            self._state.serve(version)
        self.last_seconds = time.monotonic() - start
