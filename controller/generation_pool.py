"""The generation workers as one: routes calls, makes lost ones again elsewhere, and loads new weights into all of them.

Routing is least outstanding, with stickiness to the worker that holds the rollout's prefix. A call waits here, in order of
arrival, while no worker has room for it.

Invariants: `outstanding` of a member is the number of attempts that run on it, after every call, cancelled or not. Of a
call's attempts at most one is answered; a new one begins only when the one before was given up.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio
from msgspec.structs import replace

from controller.config.schema import FailuresConfig
from controller.member import Member, Quarantined, VersionMismatch, Weights, WorkerState
from controller.retries import Fault, fault_of, in_ledgers_words, pause_before
from ledger.errors import CallFailedError
from ledger.reasons import CallFailure
from ledger.records import CallReply, CallRequest
from workers.rpc.errors import RemoteError, RpcError, RpcTimeout


@dataclass(frozen=True)
class CallTrouble:
    """What went wrong with a rollout's calls through no fault of its own."""

    attempts_lost: bool = False
    """Attempts were given up, which may have staged rows."""
    lost: str = ""
    """Why a call got no answer in spite of all attempts; empty when each got one."""


@dataclass(eq=False)
class _Waiter:
    """A call that waits for room. `member` is set, and the place there taken, when `given` is."""

    home: Member | None
    avoid: Member | None
    given: anyio.Event = field(default_factory=anyio.Event)
    member: Member | None = None


class GenerationPool:
    """`call_timeout_s` is the deadline of one model call, all its attempts included. `on_call(rollout_id, start_s, end_s)`
    hears of each ended attempt."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        call_timeout_s: float,
        on_call: Callable[[str, float, float], None],
        failures: FailuresConfig | None = None,
        weights: Weights | None = None,
    ) -> None:
        """`weights` are what the members were started with."""
        self.members = tuple(members)
        self.weights = weights or Weights(0)
        """What a worker must have acknowledged to serve; while new ones are loaded, those."""
        self.counts: Counter[str] = Counter()
        """Since the run began: calls_retried, calls_lost."""
        self._call_timeout_s = call_timeout_s
        self._failures = failures or FailuresConfig()
        self._on_call = on_call
        self._home: dict[str, Member] = {}
        self._trouble: dict[str, CallTrouble] = {}
        self._waiting: dict[_Waiter, None] = {}

    @property
    def outstanding(self) -> int:
        """Model calls in flight at the workers."""
        return sum(m.outstanding for m in self.members)

    @property
    def waiting(self) -> int:
        """Model calls that wait for a worker with room."""
        return len(self._waiting)

    async def generate(self, request: CallRequest) -> CallReply:
        """Run one call on the worker that has its prefix, else the least busy one; try lost attempts again.

        Raises CallRefused for a request that no worker can serve, CallFailedError for what went wrong otherwise, or
        ProtocolError. A cancellation aborts the call in its engine.
        """
        member: Member | None = None
        lost: Exception | None = None
        deadline = anyio.current_time() + self._call_timeout_s
        attempt = 0
        try:
            with anyio.move_on_after(self._call_timeout_s):
                while True:
                    member = await self._place(request, avoid=member)
                    try:
                        return await self._attempt(member, request, deadline)
                    except Exception as error:
                        fault = fault_of(error)
                        attempt += 1
                        self._blame(member, fault, error)
                        if fault is None or attempt == self._failures.call_attempts:
                            if fault is not None or (lost is not None and isinstance(error, RpcTimeout)):
                                self._lose(request, f"{attempt} attempts failed, the last one: {error}")
                            named = in_ledgers_words(request.call_id, error)
                            if named is error:
                                raise
                            raise named from error
                        lost = error
                        request = replace(request, attempt=attempt)
                    self.counts["calls_retried"] += 1
                    self._trouble[request.rollout_id] = CallTrouble(attempts_lost=True)
                    await anyio.sleep(pause_before(attempt, self._failures))
        except anyio.get_cancelled_exc_class():
            # The gate's deadline, or the rollout's: the call itself was not slow if it had no worker to run on.
            if lost is not None or not self._any_serving():
                self._lose(request, self._no_worker(lost))
            raise
        if lost is None and self._any_serving():
            raise CallFailedError(request.call_id, CallFailure.TIMEOUT, f"no answer within {self._call_timeout_s:g} s")
        why = self._no_worker(lost)
        self._lose(request, why)
        raise CallFailedError(request.call_id, CallFailure.GENERATION_FAILED, why)

    def trouble(self, rollout_id: str) -> CallTrouble:
        """What went wrong with the calls that the rollout made so far."""
        return self._trouble.get(rollout_id, CallTrouble())

    def forget(self, rollout_id: str) -> None:
        """The rollout makes no more calls."""
        self._home.pop(rollout_id, None)
        self._trouble.pop(rollout_id, None)

    def wake(self) -> None:
        """Give waiting calls to workers that have room. To be called when a worker begins to serve or its limit rises."""
        while self._waiting:
            waiter = next(iter(self._waiting))
            member = self._choose(waiter.home, waiter.avoid)
            if member is None:
                return
            del self._waiting[waiter]
            waiter.member = member
            member.outstanding += 1
            waiter.given.set()

    async def load_weights(self, weights: Weights, *, timeout: float) -> None:
        """Load `weights` into every worker that is in service, and take out each that fails or is late (`timeout`, seconds).

        From here on a worker has to acknowledge them to serve. Raises the refusal when all workers refuse the file; then
        the version before still counts.
        """
        before, self.weights = self.weights, weights
        asked_in = (WorkerState.JOINING, WorkerState.SERVING, WorkerState.SUSPECT)
        asked = [m for m in self.members if m.state in asked_in]
        refused: dict[Member, RemoteError] = {}

        async def load(member: Member) -> None:
            try:
                await member.load(weights, timeout=timeout)
            except Quarantined:
                return
            except RemoteError as error:
                refused[member] = error
            except (RpcError, VersionMismatch) as error:
                member.take_out(f"it did not load weight version {weights.version}: {error}")
            else:
                if member.state is WorkerState.JOINING:
                    member.serve(f"it acknowledged weight version {weights.version}")

        async with anyio.create_task_group() as tg:
            for member in asked:
                tg.start_soon(load, member)
        if asked and len(refused) == len(asked) and all(e.failure.kind == "bad_weights" for e in refused.values()):
            self.weights = before
            raise next(iter(refused.values()))
        for member, error in refused.items():
            # While others loaded, it may have been taken out, and another process begun in its place.
            if member.state in asked_in and member.version != weights.version:
                member.take_out(f"it did not load weight version {weights.version}: {error}")
        self.wake()

    async def _place(self, request: CallRequest, *, avoid: Member | None) -> Member:
        """A worker with room, and a place on it taken."""
        home = self._home.get(request.rollout_id) if request.parent is not None else None
        member = self._choose(home, avoid) if not self._waiting else None
        if member is not None:
            member.outstanding += 1
        else:
            waiter = _Waiter(home, avoid)
            self._waiting[waiter] = None
            try:
                await waiter.given.wait()
            except BaseException:
                self._waiting.pop(waiter, None)
                if waiter.member is not None:
                    self._leave(waiter.member)
                raise
            member = waiter.member
            assert member is not None
        self._home[request.rollout_id] = member
        return member

    async def _attempt(self, member: Member, request: CallRequest, deadline: float) -> CallReply:
        """One attempt, on a place that was taken; it is free again afterwards."""
        start = time.monotonic()
        left = max(0.0, deadline - anyio.current_time())
        try:
            reply = await member.generate(request, timeout=left)
        finally:
            self._leave(member)
            self._on_call(request.rollout_id, start, time.monotonic())
        member.failed_in_a_row = 0
        return reply

    def _leave(self, member: Member) -> None:
        member.outstanding -= 1
        if self._waiting:
            self.wake()

    def _choose(self, home: Member | None, avoid: Member | None) -> Member | None:
        if home is not None and home is not avoid and home.has_room:
            return home
        open_to_all = [m for m in self.members if m.has_room]
        return min(open_to_all, key=lambda m: (m is avoid, m.outstanding), default=None)

    def _blame(self, member: Member, fault: Fault | None, error: Exception) -> None:
        """Have the worker's part in a failed attempt judged."""
        if fault is Fault.GONE:
            member.take_out(str(error))
        elif fault is Fault.DOUBT:
            member.failed_in_a_row += 1
            member.doubt(f"a call failed: {error}")

    def _lose(self, request: CallRequest, why: str) -> None:
        self.counts["calls_lost"] += 1
        self._trouble[request.rollout_id] = CallTrouble(attempts_lost=True, lost=why)

    def _any_serving(self) -> bool:
        return any(m.state is WorkerState.SERVING for m in self.members)

    def _no_worker(self, lost: Exception | None) -> str:
        workers = ", ".join(f"{m.name} is {m.state} ({m.why})" for m in self.members)
        last = "" if lost is None else f"; the attempt before: {lost}"
        return f"no answer within {self._call_timeout_s:g} s: {workers}{last}"
