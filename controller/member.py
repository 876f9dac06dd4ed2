"""One generation worker as the controller sees it: an explicit state, and what may be asked of it in that state.

    joining -> serving <-> suspect -> quarantined <-> recovering -> serving,   quarantined | recovering -> retired

Invariants: only a serving worker is given calls. It came to serve by acknowledging the weight version of that moment, and by
nothing else. When it is quarantined, whatever waits for it is told so at once.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import anyio

from controller.aimd import CallLimit
from ledger.records import CallReply, CallRequest
from workers.generation.api import GENERATE, LOAD_WEIGHTS, STATS, LoadWeights
from workers.generation.engine import EngineStats
from workers.rpc.client import RpcClient
from workers.rpc.method import Empty

Result = TypeVar("Result")


class WorkerState(StrEnum):
    JOINING = "joining"
    """Started, and not yet known to hold the run's weights."""
    SERVING = "serving"
    SUSPECT = "suspect"
    """A probe or a call failed: no new calls until a probe is answered; those that it has go on."""
    QUARANTINED = "quarantined"
    """No calls; those that it had were made elsewhere."""
    RECOVERING = "recovering"
    """Being brought to the run's weights, or restarted."""
    RETIRED = "retired"
    """Given up."""


_S = WorkerState
_NEXT: dict[WorkerState, frozenset[WorkerState]] = {
    _S.JOINING: frozenset({_S.SERVING, _S.QUARANTINED}),
    _S.SERVING: frozenset({_S.SUSPECT, _S.QUARANTINED}),
    _S.SUSPECT: frozenset({_S.SERVING, _S.QUARANTINED}),
    _S.QUARANTINED: frozenset({_S.RECOVERING, _S.RETIRED}),
    _S.RECOVERING: frozenset({_S.SERVING, _S.QUARANTINED, _S.RETIRED}),
    _S.RETIRED: frozenset(),
}


class IllegalTransition(Exception):
    """A worker was asked to go to a state that its present state does not allow."""


class VersionMismatch(Exception):
    """An engine serves another weight version than the one it was told to load."""


class Quarantined(Exception):
    """The worker was quarantined while something waited for its answer."""


class StaleWeights(Exception):
    """An engine answered with weights older than those that its worker had acknowledged: it was restarted meanwhile."""


@dataclass(frozen=True, eq=False)
class Weights:
    """A version and where the trainer has it; without an address it is what a worker that was just started has."""

    version: int
    address: str | None = None


def _ignore(member: Member, before: WorkerState) -> None:
    """Nobody is to hear of it."""


class Member:
    """`on_move(member, before)` hears of every change of state, after it; `clock` gives seconds."""

    def __init__(
        self,
        name: str,
        client: RpcClient,
        *,
        limit: CallLimit | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.client = client
        """Of the present process."""
        self.limit = limit or CallLimit()
        self.on_move: Callable[[Member, WorkerState], None] = _ignore
        self.state = WorkerState.JOINING
        self.why = "it was started"
        """What led to the present state."""
        self.since = clock()
        self.version: int | None = None
        """The weights that it acknowledged last."""
        self.loads = 0
        """Loads that began, and those among them that go on."""
        self.loading = 0
        self.outstanding = 0
        """Calls given to it."""
        self.failed_in_a_row = 0
        self.hopeless = False
        """Quarantined for something that only a restart cures."""
        self.stats: EngineStats | None = None
        """Its last answer to a probe."""
        self.doubted = anyio.Event()
        """Set when it should be probed at once."""
        self._clock = clock
        self._moved = anyio.Event()
        self._waits: set[anyio.CancelScope] = set()

    @property
    def has_room(self) -> bool:
        """Whether it may be given a call now."""
        return self.state is WorkerState.SERVING and self.outstanding < self.limit.now

    def serve(self, why: str) -> None:
        """Give it calls. Raises IllegalTransition also when it has not acknowledged any version."""
        if self.version is None:
            raise IllegalTransition(f"{self.name} has acknowledged no weight version and cannot serve")
        self._move(WorkerState.SERVING, why)

    def suspect(self, why: str) -> None:
        """Give it no more calls until a probe is answered. One that does not serve stays what it is."""
        if self.state is WorkerState.SERVING:
            self._move(WorkerState.SUSPECT, why)

    def doubt(self, why: str) -> None:
        """`suspect`, and have it probed at once."""
        self.suspect(why)
        self.doubted.set()

    def quarantine(self, why: str, *, hopeless: bool = False) -> None:
        """Take it out; all that waits for it ends with `Quarantined`. Its weights have to be acknowledged again."""
        self._move(WorkerState.QUARANTINED, why)
        self.version = None
        self.hopeless = hopeless
        self.failed_in_a_row = 0
        for scope in self._waits:
            scope.cancel()

    def take_out(self, why: str, *, hopeless: bool = False) -> None:
        """Quarantine it, unless it is out already: two signs of trouble may come together."""
        if self.state not in (WorkerState.QUARANTINED, WorkerState.RETIRED):
            self.quarantine(why, hopeless=hopeless)

    def recover(self, why: str) -> None:
        self._move(WorkerState.RECOVERING, why)

    def retire(self, why: str) -> None:
        """Give it up for good."""
        self._move(WorkerState.RETIRED, why)

    @classmethod
    def serving(cls, client: RpcClient, *, version: int = 0) -> Member:
        """A worker that is known to hold weights of `version`, and that nobody watches."""
        member = cls(client.name, client)
        member.version = version
        member.serve("it is said to hold them")
        return member

    async def until(self, *states: WorkerState) -> None:
        """Return when it is in one of `states`."""
        while self.state not in states:
            await self._moved.wait()

    async def generate(self, request: CallRequest, *, timeout: float) -> CallReply:
        """Run a call on it. Raises Quarantined, StaleWeights or the RPC's errors."""
        if self.state not in (WorkerState.SERVING, WorkerState.SUSPECT):
            raise Quarantined(f"{self.name} is {self.state}: {self.why}")
        version = self.version or 0
        reply = await self._answer(lambda: self.client.call(GENERATE, request, timeout=timeout))
        spans = reply.coords.weight_spans
        if spans and spans[0].version < version:
            raise StaleWeights(
                f"{self.name} sampled under weight version {spans[0].version}, having acknowledged {version}"
            )
        return reply

    async def load(self, weights: Weights, *, timeout: float) -> None:
        """Have it load `weights` and acknowledge them; a version without an address it must serve already.

        Raises VersionMismatch, Quarantined or the RPC's errors; what it serves is then unknown.
        """
        self.loads += 1
        self.loading += 1
        try:
            version = await self._answer(lambda: self._load(weights, timeout))
        finally:
            self.loading -= 1
        if version != weights.version:
            raise VersionMismatch(f"{self.name} serves weight version {version}, not {weights.version}")
        self.version = version

    async def probe(self, *, timeout: float) -> EngineStats:
        """Ask how its engine is. Raises Quarantined or the RPC's errors."""
        self.doubted = anyio.Event()
        self.stats = await self._answer(lambda: self.client.call(STATS, Empty(), timeout=timeout))
        return self.stats

    async def _answer(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """`call`'s result. Raises Quarantined, having cancelled it, as soon as the worker is quarantined."""
        scope = anyio.CancelScope()
        self._waits.add(scope)
        try:
            with scope:
                reply = await call()
                # It may come in the very turn of the loop in which the worker is taken out.
                if not scope.cancel_called:
                    return reply
        finally:
            self._waits.discard(scope)
        raise Quarantined(f"{self.name} was quarantined: {self.why}")

    async def _load(self, weights: Weights, timeout: float) -> int:
        if weights.address is None:
            return (await self.client.call(STATS, Empty(), timeout=timeout)).weight_version
        request = LoadWeights(address=weights.address, version=weights.version)
        return (await self.client.call(LOAD_WEIGHTS, request, timeout=timeout)).version

    def _move(self, to: WorkerState, why: str) -> None:
        before = self.state
        if to not in _NEXT[before]:
            raise IllegalTransition(f"{self.name} is {before} and cannot become {to} ({why})")
        self.state, self.why, self.since = to, why, self._clock()
        moved, self._moved = self._moved, anyio.Event()
        moved.set()
        self.on_move(self, before)
