"""Names what holds a run up: from the train pump along who waits for whom, to the part that waits for nobody."""

from __future__ import annotations

from controller.buffer import GroupState
from controller.waiting import (
    BUFFER,
    ENGINES,
    ENVIRONMENT,
    EVALUATION,
    FINALIZER,
    LOOP,
    PLANE,
    ROLLOUT_PUMP,
    SYNC,
    TRAIN_PUMP,
    TRAINER,
)
from controller.waits.graph import Culprit, EngineState, Part, WaitGraph

_SILENT_S = 1.0
_LOST_S = 5.0
"""An operation of the data plane that is open for so long is what its caller is held up by."""


def culprit(graph: WaitGraph) -> Culprit | None:
    """None when there is nothing to go by: the run has not begun, or has just made progress."""
    loop = graph.loop
    if loop is not None and loop.silent_seconds > _SILENT_S:
        return Culprit(part=LOOP, why=f"blocked for {loop.silent_seconds:.1f} s at {loop.at}")
    if graph.permits is None:
        return None
    pump = _part(graph, TRAIN_PUMP)
    if pump is None:  # Between two things that it does, if not for long.
        moves = graph.no_progress_seconds <= _SILENT_S
        return None if moves else Culprit(part=TRAIN_PUMP, why="does not run")
    if pump.on in (BUFFER, EVALUATION):
        return _of_the_groups(graph)
    return _behind(graph, pump)


def _behind(graph: WaitGraph, waiting: Part) -> Culprit:
    """Whom a part waits for, and what that one waits for."""
    if waiting.on in (PLANE, TRAINER):
        stuck = _stuck_operation(graph)  # The trainer reads its rows from there.
        if stuck is not None:
            return stuck
    sync = _part(graph, SYNC)
    if waiting.on == SYNC and sync is not None:
        return _sync(graph, sync)
    if not waiting.on:
        return _of(waiting)
    return Culprit(part=waiting.on, why=f"{waiting.name} has been {waiting.what} for {waiting.seconds:.1f} s")


def _sync(graph: WaitGraph, sync: Part) -> Culprit:
    if sync.on != ENGINES:
        return Culprit(part=sync.on or SYNC, why=f"{sync.name} has been {sync.what} for {sync.seconds:.1f} s")
    late = [engine.name for engine in graph.engines if engine.loading]
    return Culprit(
        part=SYNC,
        why=f"{', '.join(late) or 'no engine'} has not acknowledged: {sync.what} for {sync.seconds:.1f} s",
    )


def _of_the_groups(graph: WaitGraph) -> Culprit:
    """The train pump waits for groups: what keeps the next one from being ready."""
    permits = graph.permits
    assert permits is not None
    counts = permits.groups
    if counts.get(GroupState.FINALIZING, 0) > 0:
        busy = [part for part in graph.parts if part.name.startswith(FINALIZER)]
        if not busy:
            number = counts[GroupState.FINALIZING]
            return Culprit(part=FINALIZER, why=f"{number} groups wait to be finalized, and no finalizer works at one")
        if not graph.slowest or busy[0].seconds >= graph.slowest[0].phase_seconds / 2:
            return _stuck_operation(graph) or _of(busy[0])
    if graph.slowest:
        return _of_the_rollouts(graph)
    pump = _part(graph, ROLLOUT_PUMP)
    if pump is not None and pump.on:
        return Culprit(part=pump.on, why=f"{ROLLOUT_PUMP} has been {pump.what} for {pump.seconds:.1f} s")
    if permits.may_dispatch:
        state = "does not run" if pump is None else f"{pump.what}, for {pump.seconds:.1f} s"
        return Culprit(part=ROLLOUT_PUMP, why=f"a group may be dispatched, and it does not: it {state}")
    if permits.held:
        sync = _part(graph, SYNC)
        return (
            Culprit(part=SYNC, why="dispatch is held, and no synchronisation runs")
            if sync is None
            else _sync(graph, sync)
        )
    groups = ", ".join(f"{n} {state}" for state, n in counts.items()) or "no group"
    full = "full" if permits.used >= permits.capacity else f"{permits.used} of {permits.capacity} slots taken"
    return Culprit(part=BUFFER, why=f"{full} ({groups}), the sampler admits no group and selects none")


def _of_the_rollouts(graph: WaitGraph) -> Culprit:
    slowest = max(graph.slowest, key=lambda rollout: rollout.phase_seconds)
    place = f"rollout {slowest.id} {slowest.phase} for {slowest.phase_seconds:.1f} s"
    if slowest.at:
        place += f", at {slowest.at}"
    if slowest.on != ENGINES:
        return Culprit(part=slowest.on or ENVIRONMENT, why=place)
    serving = [engine for engine in graph.engines if engine.state == "serving"]
    if not serving:
        states = "; ".join(f"{engine.name} {engine.state}: {engine.why}" for engine in graph.engines)
        return Culprit(part=ENGINES, why=f"none serves ({states})")
    wedged = [engine for engine in serving if _wedged(engine, slowest.phase_seconds / 2)]
    if wedged:
        worst = max(wedged, key=lambda engine: engine.no_token_seconds or 0.0)
        why = (
            f"answers, with {worst.outstanding} calls outstanding, and gave no token for {worst.no_token_seconds:.1f} s"
        )
        return Culprit(part=worst.name, why=why)
    return _stuck_operation(graph) or Culprit(part=ENGINES, why=place)


def _wedged(engine: EngineState, seconds: float) -> bool:
    return engine.outstanding > 0 and engine.no_token_seconds is not None and engine.no_token_seconds > seconds


def _stuck_operation(graph: WaitGraph) -> Culprit | None:
    if PLANE in graph.unhealthy:
        return Culprit(part=PLANE, why=graph.unhealthy[PLANE])
    if graph.plane is None or not graph.plane.open or graph.plane.open[0].seconds < _LOST_S:
        return None
    oldest = graph.plane.open[0]
    return Culprit(part=PLANE, why=f"{oldest.what} has had no answer for {oldest.seconds:.1f} s")


def _part(graph: WaitGraph, name: str) -> Part | None:
    return next((part for part in graph.parts if part.name == name), None)


def _of(part: Part) -> Culprit:
    return Culprit(part=part.name, why=f"{part.what}, for {part.seconds:.1f} s")
