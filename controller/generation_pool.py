"""The generation workers as one: routes calls, and loads new weights into all of them.

Routing is least outstanding, with stickiness to the worker that holds the rollout's prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio

from ledger.errors import CallFailedError, CallRefused
from ledger.reasons import CallFailure
from ledger.records import CallReply, CallRequest
from workers.generation.api import GENERATE, LOAD_WEIGHTS, LoadWeights, WeightsLoaded
from workers.rpc.client import RpcClient
from workers.rpc.errors import RemoteError


class VersionMismatch(Exception):
    """An engine acknowledged another weight version than the one it was told to load."""


@dataclass(eq=False)
class _Member:
    client: RpcClient
    outstanding: int = 0


class GenerationPool:
    """`call_timeout_s` is the deadline of one model call. `on_call(rollout_id, start_s, end_s)` hears of each ended call."""

    def __init__(
        self,
        clients: Sequence[RpcClient],
        *,
        call_timeout_s: float,
        on_call: Callable[[str, float, float], None],
    ) -> None:
        self._members = [_Member(c) for c in clients]
        self._call_timeout_s = call_timeout_s
        self._on_call = on_call
        self._home: dict[str, _Member] = {}

    @property
    def outstanding(self) -> int:
        """Model calls in flight."""
        return sum(m.outstanding for m in self._members)

    async def generate(self, request: CallRequest) -> CallReply:
        """Run one call on the worker that has its prefix, else the least busy one.

        Raises CallRefused for a request that no worker can serve, CallFailedError for what the worker says went wrong, else
        the RPC's errors. A cancellation aborts the call in its engine.
        """
        home = self._home.get(request.rollout_id) if request.parent is not None else None
        member = home or min(self._members, key=lambda m: m.outstanding)
        self._home[request.rollout_id] = member
        member.outstanding += 1
        start = time.monotonic()
        try:
            return await member.client.call(GENERATE, request, timeout=self._call_timeout_s)
        except RemoteError as e:
            raise _ledgers(request.call_id, e) from e
        finally:
            member.outstanding -= 1
            self._on_call(request.rollout_id, start, time.monotonic())

    def forget(self, rollout_id: str) -> None:
        """The rollout makes no more calls."""
        self._home.pop(rollout_id, None)

    async def load_weights(self, path: str, version: int, *, timeout: float) -> None:
        """Load a weights file into every worker and wait for each to acknowledge `version`."""

        async def load(member: _Member) -> None:
            done: WeightsLoaded = await member.client.call(
                LOAD_WEIGHTS, LoadWeights(path=path, version=version), timeout=timeout
            )
            if done.version != version:
                raise VersionMismatch(f"{member.client.name} serves weight version {done.version}, not {version}")

        async with anyio.create_task_group() as tg:
            for member in self._members:
                tg.start_soon(load, member)


def _ledgers(call_id: str, error: RemoteError) -> CallRefused | CallFailedError:
    """A worker's failure in the ledger's words."""
    failure = error.failure
    if failure.failure_class == "data":
        return CallRefused(failure.kind, failure.message)
    reason = CallFailure.GENERATION_FAILED
    if failure.failure_class == "capture":
        reason = CallFailure.CAPTURE_FAILED
    elif failure.kind == "staging_failed":
        reason = CallFailure.STAGING_FAILED
    return CallFailedError(call_id, reason, f"{failure.kind}: {failure.message}")
