"""The fleet monitor: sees that a generation worker is in trouble, takes it out, and brings it back.

Signs of trouble: its process died; probes without an answer; calls that fail one after another; another weight version than
it acknowledged; and no token while requests are in its engine, since a wedged engine answers probes. A worker comes back
only by acknowledging the run's present weights, restarted if it does not by itself, and is given up after some restarts.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

import anyio

from controller.aimd import CallLimit
from controller.config.schema import FleetConfig
from controller.fleet import ReplaceableWorker
from controller.generation_pool import GenerationPool
from controller.member import Member, Quarantined, VersionMismatch, WorkerState
from controller.waiting import Activities
from workers.generation.engine import EngineStats
from workers.launch import LaunchError
from workers.rpc.errors import RpcError

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
"""Between two attempts to bring a worker back."""
_IN_SERVICE = (WorkerState.JOINING, WorkerState.SERVING, WorkerState.SUSPECT)
_OUT = (WorkerState.QUARANTINED, WorkerState.RETIRED)


class FleetLost(Exception):
    """Too few generation workers are left. The message says what became of the others."""


class RestartBudget:
    """`limit` restarts within any `window_s` seconds."""

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit = limit
        self._window_s = window_s
        self._taken: deque[float] = deque()

    def take(self, now: float) -> bool:
        """Whether one more is allowed at `now`; it then counts."""
        while self._taken and now - self._taken[0] >= self._window_s:
            self._taken.popleft()
        if len(self._taken) >= self._limit:
            return False
        self._taken.append(now)
        return True


class TokenProgress:
    """Tells an engine that is busy and gets nothing done from one that has nothing to do."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._since = 0.0

    def stalled_s(self, stats: EngineStats, loads: int, *, loading: bool, now: float) -> float:
        """Seconds, up to `now`, without a token while requests were in the engine. A load of weights begins anew."""
        seen = (stats.generated_tokens, loads)
        if seen != self._seen or loading or stats.running + stats.waiting == 0:
            self._seen, self._since = seen, now
        return now - self._since


class FleetMonitor:
    """`workers` are the processes behind the pool's members, by name."""

    def __init__(
        self,
        pool: GenerationPool,
        workers: Mapping[str, ReplaceableWorker],
        *,
        config: FleetConfig,
        load_timeout_s: float,
        activities: Activities,
        on_state: Callable[[str, str, float, float], None],
    ) -> None:
        """`load_timeout_s` bounds the loading of weights. `on_state(worker, state, start_s, end_s)` hears of each state that
        ended, but of serving."""
        self._pool = pool
        self._workers = workers
        self._config = config
        self._load_timeout_s = load_timeout_s
        self._activities = activities
        self._on_state = on_state
        self._budgets = {m.name: RestartBudget(config.max_restarts, config.restart_window_s) for m in pool.members}
        self._since = {m.name: m.since for m in pool.members}
        self.counts: Counter[str] = Counter()
        """Since the run began: quarantined, restarted, retired."""
        for member in pool.members:
            member.on_move = self._moved

    async def run(self) -> None:
        """Watch until cancelled. Raises FleetLost when fewer than `min_serving` workers are left."""
        async with anyio.create_task_group() as tg:
            for member in self._pool.members:
                tg.start_soon(self._watch, member, self._workers[member.name])

    async def _watch(self, member: Member, worker: ReplaceableWorker) -> None:
        while member.state is not WorkerState.RETIRED:
            if member.state is WorkerState.JOINING:
                await self._join(member)
            elif member.state is WorkerState.QUARANTINED:
                await self._bring_back(member, worker)
            else:
                await self._observe(member, worker)
        self._require_enough()

    async def _join(self, member: Member) -> None:
        try:
            await self._handshake(member)
        except (RpcError, VersionMismatch, Quarantined) as error:
            member.take_out(f"it did not join: {error}")

    async def _observe(self, member: Member, worker: ReplaceableWorker) -> None:
        """Return when it has been quarantined."""
        async with anyio.create_task_group() as tg:
            tg.start_soon(self._quarantine_when_dead, member, worker)
            tg.start_soon(self._probe, member)
            await member.until(*_OUT)
            tg.cancel_scope.cancel()

    async def _quarantine_when_dead(self, member: Member, worker: ReplaceableWorker) -> None:
        epitaph = await worker.died()
        logger.info("%s", epitaph)
        member.take_out(_first_line(epitaph))

    async def _probe(self, member: Member) -> None:
        """Ask for its stats at every tick, and at once when it is doubted. This is the fleet's clock."""
        missed = 0
        progress = TokenProgress()
        while True:
            with anyio.move_on_after(self._config.probe_every_s):
                await member.doubted.wait()
            loads, loading = member.loads, member.loading
            try:
                stats = await member.probe(timeout=self._config.probe_timeout_s)
            except Quarantined:
                return
            except RpcError as error:
                missed += 1
                if missed >= self._config.missed_probes:
                    member.take_out(f"{missed} probes in a row without an answer, the last one: {error}")
                    return
                member.suspect(str(error))
                continue
            missed = 0
            undisturbed = loads == member.loads and not loading
            trouble = self._trouble(member, stats, undisturbed=undisturbed)
            stalled = progress.stalled_s(stats, member.loads, loading=member.loading > 0, now=time.monotonic())
            if trouble:
                member.take_out(trouble)
            elif stalled >= self._config.stalled_after_s:
                held = f"{stats.running} requests running, {stats.waiting} waiting"
                member.take_out(f"its engine is wedged: no token for {stalled:.0f} s, {held}", hopeless=True)
            else:
                self._is_well(member, stats)

    def _trouble(self, member: Member, stats: EngineStats, *, undisturbed: bool) -> str:
        """What an answered probe says against it. `undisturbed`: no weights were loaded since it was asked."""
        if undisturbed and not stats.serving:
            return "its engine failed, and does not have the weights that it had"
        if undisturbed and stats.weight_version != member.version:
            return f"it serves weight version {stats.weight_version}, having acknowledged {member.version}"
        if member.failed_in_a_row >= self._config.failed_calls:
            return f"{member.failed_in_a_row} calls in a row failed, the last one: {member.why}"
        return ""

    def _is_well(self, member: Member, stats: EngineStats) -> None:
        member.limit.observe(stats, member.outstanding)
        if member.state is WorkerState.SUSPECT:
            member.serve("it answers again")
        self._pool.wake()

    async def _bring_back(self, member: Member, worker: ReplaceableWorker) -> None:
        """Return when it serves or is retired."""
        pause = _FIRST_PAUSE_S
        restart_at = 0.0 if member.hopeless else time.monotonic() + self._config.restart_after_s
        with self._activities.doing(member.name, f"out of service: {member.why}"):
            while not _serves(member):
                trouble = member.why
                left = restart_at - time.monotonic()
                if left <= 0 or not worker.alive:
                    if not self._budgets[member.name].take(time.monotonic()):
                        member.retire(f"restarted {self._config.max_restarts} times already; {trouble}")
                        return
                    await self._restart(member, worker)
                    # Having been loaded anew it needs no more than the weights.
                    restart_at = time.monotonic() + self._load_timeout_s
                else:
                    member.recover(trouble)
                    await self._recover(member, worker, within_s=left)
                if not _serves(member):
                    await anyio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _restart(self, member: Member, worker: ReplaceableWorker) -> None:
        """Put a new process in its place and have that take the weights; if that fails it is quarantined."""
        self.counts["restarted"] += 1
        doing = f"restarting it: {member.why}"
        member.recover(doing)
        with self._activities.doing(member.name, doing):
            await worker.end()
            try:
                await worker.start()
            except LaunchError as error:
                logger.info("%s", error)
                member.take_out(_first_line(str(error)))
                return
            member.client = worker.client
            await self._recover(member, worker, within_s=self._load_timeout_s)

    async def _recover(self, member: Member, worker: ReplaceableWorker, *, within_s: float) -> None:
        """One attempt to have it acknowledge the run's weights; if that fails it is quarantined."""
        async with anyio.create_task_group() as tg:
            tg.start_soon(self._quarantine_when_dead, member, worker)
            failed = f"it did not take weight version {self._pool.weights.version}"
            with anyio.move_on_after(within_s):
                try:
                    await self._handshake(member)
                except (RpcError, VersionMismatch, Quarantined) as error:
                    member.take_out(f"{failed}: {error}")
            if not _serves(member):
                member.take_out(f"{failed} within {within_s:.0f} s")
            tg.cancel_scope.cancel()

    async def _handshake(self, member: Member) -> None:
        """Have it acknowledge the weights of the present, which may move on meanwhile, and then serve.

        Raises Quarantined also when someone else has taken it out before the end.
        """
        while True:
            weights = self._pool.weights
            try:
                await member.load(weights, timeout=self._load_timeout_s)
            except (RpcError, VersionMismatch):
                if weights is self._pool.weights:
                    raise
            else:
                if weights is self._pool.weights:
                    break
        if member.state is WorkerState.QUARANTINED:
            raise Quarantined(member.why)
        member.serve(f"it acknowledged weight version {weights.version}")
        self._pool.wake()

    def _require_enough(self) -> None:
        retired = [m for m in self._pool.members if m.state is WorkerState.RETIRED]
        left = len(self._pool.members) - len(retired)
        if left < self._config.min_serving:
            fates = "; ".join(f"{m.name}: {m.why}" for m in retired)
            raise FleetLost(
                f"{left} of {len(self._pool.members)} generation workers are left, fleet.min_serving is "
                f"{self._config.min_serving}. Given up were {fates}"
            )

    def _moved(self, member: Member, before: WorkerState) -> None:
        """Log, count and trace a change of state."""
        if before is not WorkerState.SERVING:
            self._on_state(member.name, before, self._since[member.name], member.since)
        self._since[member.name] = member.since
        state = member.state
        if state is WorkerState.RETIRED or (state is WorkerState.QUARANTINED and before in _IN_SERVICE):
            self.counts[state] += 1
        # The steps of bringing one back are many, and end in one that is told.
        told = before in _IN_SERVICE or state in (WorkerState.SERVING, WorkerState.RETIRED)
        first = before is WorkerState.JOINING and state is WorkerState.SERVING
        logger.log(
            logging.WARNING if told and not first else logging.INFO, "%s is %s: %s", member.name, state, member.why
        )


def member_of(worker: ReplaceableWorker, config: FleetConfig) -> Member:
    """The member that stands for a worker which was just started."""
    return Member(worker.name, worker.client, limit=CallLimit(config.max_calls, adapt=config.adapt_calls))


def _serves(member: Member) -> bool:
    return member.state is WorkerState.SERVING


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]
