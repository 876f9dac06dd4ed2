"""Takes the wait graph of a run at one moment. Cheap, and without a suspension: from the loop, or beside a blocked one."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from controller.buffer import ReplayBuffer
from controller.fleet_monitor import TokenProgress
from controller.generation_pool import GenerationPool
from controller.member import Member
from controller.run_state import RunState
from controller.samplers import Sampler
from controller.sentinel.sentinel import Sentinel
from controller.waiting import Activities
from controller.waits.diagnosis import culprit
from controller.waits.graph import (
    EngineState,
    LoopState,
    Part,
    Permits,
    PlaneState,
    PlayedRollout,
    StepHoles,
    Sync,
    WaitGraph,
)
from controller.waits.plane import WatchedPlane
from controller.weight_sync import WeightSync

_SLOWEST = 10
_SILENT_S = 0.5


def loop_state(sentinel: Sentinel) -> LoopState:
    """Of the loop that `sentinel` watches; from any thread."""
    silent = sentinel.silent_s
    return LoopState(
        silent_seconds=silent,
        at=sentinel.where() if silent > _SILENT_S else "",
        figures=dict(sentinel.lag.figures()),
        stalls=dict(sentinel.stalls),
        stood_still_seconds=sentinel.stood_still_s,
    )


class WaitView:
    """`rollouts` has what each rollout does; `may_dispatch` says whether the policy admits a group now;
    `progress` counts groups committed and steps done."""

    def __init__(
        self,
        *,
        buffer: ReplayBuffer,
        state: RunState,
        sampler: Sampler,
        pool: GenerationPool,
        plane: WatchedPlane,
        weight_sync: WeightSync,
        activities: Activities,
        rollouts: Activities,
        environment: str,
        rejections: Mapping[str, int],
        processes: Callable[[], Mapping[str, int]],
        may_dispatch: Callable[[], bool],
        progress: Callable[[], tuple[int, int]],
    ) -> None:
        self._buffer = buffer
        self._state = state
        self._sampler = sampler
        self._pool = pool
        self._plane = plane
        self._weight_sync = weight_sync
        self._activities = activities
        self._rollouts = rollouts
        self._environment = environment
        self._rejections = rejections
        self._processes = processes
        self._may_dispatch = may_dispatch
        self._progress = progress
        self._tokens: dict[str, TokenProgress] = {}
        self._seen = progress()
        self._seen_at = time.monotonic()

    def take(self, idle: WaitGraph, unhealthy: Mapping[str, str]) -> WaitGraph:
        """`idle` is what is known without the run; `unhealthy` has the health checks that fail, and what they say."""
        now = time.monotonic()
        graph = replace(
            idle,
            step=self._state.step,
            last_step=self._state.last_step,
            groups_committed=self._progress()[0],
            no_progress_seconds=now - self._since_progress(now),
            environment=self._environment,
            parts=self._parts(now),
            permits=self._permits(),
            rollouts=len(self._rollouts),
            slowest=self._slowest(now),
            rejections=dict(self._rejections),
            steps=tuple(self._holes()),
            sync=Sync(version=self._state.version, last_seconds=self._weight_sync.last_seconds),
            plane=self._plane_state(now),
            engines=tuple(self._engine(member, now) for member in self._pool.members),
            processes=dict(self._processes()),
            calls_waiting=self._pool.waiting,
            unhealthy=dict(unhealthy),
        )
        return replace(graph, culprit=culprit(graph))

    def _since_progress(self, now: float) -> float:
        seen = self._progress()
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        return self._seen_at

    def _parts(self, now: float) -> tuple[Part, ...]:
        parts = [
            Part(name=name, what=activity.what, seconds=now - activity.since, on=activity.on)
            for name, activity in self._activities.now().items()
        ]
        return tuple(sorted(parts, key=lambda part: -part.seconds))

    def _permits(self) -> Permits:
        buffer = self._buffer
        view = self._state.view()
        return Permits(
            capacity=buffer.capacity,
            used=buffer.permits_in_use,
            groups=buffer.counts(),
            may_dispatch=self._may_dispatch() and buffer.permits_in_use < buffer.capacity,
            held=self._state.dispatch_held,
            selectable=self._sampler.select(view) is not None,
        )

    def _slowest(self, now: float) -> tuple[PlayedRollout, ...]:
        return tuple(
            PlayedRollout(
                id=rollout_id,
                seconds=now - first.since,
                phase=latest.what,
                phase_seconds=now - latest.since,
                on=latest.on,
                at=latest.at(),
            )
            for rollout_id, first, latest in self._rollouts.oldest(_SLOWEST)
        )

    def _holes(self) -> list[StepHoles]:
        """The next steps that groups are dispatched for, the one being waited for first."""
        groups: dict[int, Counter[str]] = {self._state.step: Counter()}
        for entry in self._buffer.entries:
            if entry.target_step is not None:
                groups.setdefault(max(entry.target_step, self._state.step), Counter())[str(entry.state)] += 1
        wanted = self._sampler.groups_per_step
        return [
            StepHoles(step=step, wanted=wanted, groups=dict(there), missing=max(0, wanted - there.total()))
            for step, there in sorted(groups.items())
            if step < self._state.last_step
        ]

    def _plane_state(self, now: float) -> PlaneState:
        plane = self._plane
        took, at = plane.round_trip_s, plane.answered_at
        return PlaneState(
            round_trip_ms=None if took is None else took * 1000,
            ago_seconds=None if at is None else now - at,
            open=tuple(
                Part(name="data plane", what=activity.what, seconds=now - activity.since)
                for activity in plane.open()[:_SLOWEST]
            ),
        )

    def _engine(self, member: Member, now: float) -> EngineState:
        state = EngineState(
            name=member.name,
            state=str(member.state),
            why=member.why,
            seconds=now - member.since,
            outstanding=member.outstanding,
            loading=member.loading > 0,
            weight_version=member.version,
        )
        stats = member.stats
        if stats is None:
            return state
        tokens = self._tokens.setdefault(member.name, TokenProgress())
        return replace(
            state,
            running=stats.running,
            waiting=stats.waiting,
            kv_usage=stats.kv_usage,
            no_token_seconds=tokens.stalled_s(stats, member.loads, loading=member.loading > 0, now=now),
        )


def idle_graph(run: str, doing: str, sentinel: Sentinel | None, *, ending: str = "") -> WaitGraph:
    """What is known of a run that has not begun to train, or is ending."""
    graph = WaitGraph(
        run=run,
        pid=os.getpid(),
        time=time.time(),
        doing=doing,
        ending=ending,
        loop=None if sentinel is None else loop_state(sentinel),
    )
    return replace(graph, culprit=culprit(graph))
