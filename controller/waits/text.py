"""A wait graph in plain words, for a terminal and for a stall's report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from controller.waits.graph import EngineState, LoopState, Part, PlaneState, PlayedRollout, WaitGraph

_MAX_PARTS = 20


def describe(graph: WaitGraph) -> str:
    """What holds the run up if anything does, and then every part, one line each."""
    return "\n".join(_lines(graph))


def _lines(graph: WaitGraph) -> Iterator[str]:
    yield f"run {graph.run}, process {graph.pid}: {graph.doing}"
    if graph.ending:
        yield f"the run ends: {graph.ending}"
    if graph.permits is not None:
        yield (
            f"step {graph.step} of {graph.last_step}, {graph.groups_committed} groups committed; "
            f"the last progress was {_s(graph.no_progress_seconds)} ago"
        )
    if graph.culprit is not None:
        yield f"if it does not move, then because of the {graph.culprit.part}: {graph.culprit.why}"
    for name, problem in graph.unhealthy.items():
        yield f"not healthy: {name}: {problem}"
    yield from _section("who waits", (_part(part) for part in graph.parts[:_MAX_PARTS]))
    yield from _section("replay buffer", _buffer(graph))
    yield from _section(
        f"rollouts: {graph.rollouts} are played" + (", the slowest:" if graph.slowest else ""),
        (_rollout(rollout) for rollout in graph.slowest),
        always=graph.permits is not None,
    )
    if graph.rejections:
        yield f"rollouts that were not trained so far: {_counts(graph.rejections)}"
    yield from _section("engines", _engines(graph))
    if graph.sync is not None:
        last = graph.sync.last_seconds
        took = "none yet" if last is None else f"the last one took {_s(last)}"
        yield f"weight sync: version {graph.sync.version} is served, {took}"
    if graph.plane is not None:
        yield from _plane(graph.plane)
    if graph.loop is not None:
        yield from _loop(graph.loop)
    if graph.processes:
        yield "processes: " + ", ".join(f"{name} {pid}" for name, pid in graph.processes.items())


def _section(title: str, lines: Iterator[str], *, always: bool = False) -> Iterator[str]:
    found = list(lines)
    if found or always:
        yield title
        yield from (f"  {line}" for line in found)


def _part(part: Part) -> str:
    on = f" (waits for: {part.on})" if part.on else ""
    return f"{part.name}: {part.what}, for {_s(part.seconds)}{on}"


def _buffer(graph: WaitGraph) -> Iterator[str]:
    permits = graph.permits
    if permits is None:
        return
    yield f"{permits.used} of {permits.capacity} slots taken: {_counts(permits.groups) or 'none'}"
    if permits.held:
        yield "dispatch is held while weights are synchronised"
    elif permits.may_dispatch:
        yield "a group may be dispatched"
    else:
        yield "the sampler admits no further group now"
    for step in graph.steps:
        there = f"{_counts(step.groups) or 'nothing dispatched'}"
        yield f"step {step.step} takes {step.wanted} groups: {there}; {step.missing} missing"


def _rollout(rollout: PlayedRollout) -> str:
    at = f", at {rollout.at}" if rollout.at else ""
    return f"{rollout.id}: {_s(rollout.seconds)} old, {rollout.phase} for {_s(rollout.phase_seconds)}{at}"


def _engines(graph: WaitGraph) -> Iterator[str]:
    for engine in graph.engines:
        yield _engine(engine)
    if graph.calls_waiting:
        yield f"{graph.calls_waiting} calls wait for one with room"


def _engine(engine: EngineState) -> str:
    words = [f"{engine.name}: {engine.state} for {_s(engine.seconds)}"]
    if engine.state != "serving":
        words.append(f"because {engine.why}")
    words.append(f"weights {engine.weight_version}")
    words.append(f"{engine.outstanding} calls given to it")
    if engine.running is not None:
        words.append(f"{engine.running} running and {engine.waiting} queued there")
    if engine.kv_usage is not None:
        words.append(f"KV cache {engine.kv_usage:.0%}")
    if engine.loading:
        words.append("loading weights")
    if engine.no_token_seconds:
        words.append(f"no token for {_s(engine.no_token_seconds)}")
    return ", ".join(words)


def _plane(plane: PlaneState) -> Iterator[str]:
    if plane.round_trip_ms is None or plane.ago_seconds is None:
        yield "data plane: nothing was answered yet"
    else:
        yield f"data plane: the last round trip took {plane.round_trip_ms:.1f} ms, {_s(plane.ago_seconds)} ago"
    yield from (f"  {part.what}: no answer for {_s(part.seconds)}" for part in plane.open)


def _loop(loop: LoopState) -> Iterator[str]:
    figures = loop.figures
    yield (
        f"event loop: lag p99 {figures.get('lag_p99_ms', 0.0):.1f} ms, p99.9 {figures.get('lag_p999_ms', 0.0):.1f} ms, "
        f"max {figures.get('lag_max_ms', 0.0):.1f} ms; {sum(loop.stalls.values())} stalls"
    )
    if loop.at:
        yield f"  blocked for {_s(loop.silent_seconds)} at {loop.at}"
    yield from (f"  {count} x {culprit}" for culprit, count in sorted(loop.stalls.items(), key=lambda s: -s[1])[:5])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {state}" for state, number in counts.items())


def _s(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
