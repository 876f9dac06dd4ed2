"""Any wait graph has words, and a culprit or none: never an error in the report of another one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from controller.buffer import GroupState
from controller.member import WorkerState
from controller.waiting import (
    BUFFER,
    ENGINES,
    ENVIRONMENT,
    EVALUATION,
    PLANE,
    PROMPTS,
    ROLLOUT_PUMP,
    SYNC,
    TRAIN_PUMP,
    TRAINER,
)
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
from controller.waits.text import describe

NAMES = [
    BUFFER,
    ENGINES,
    ENVIRONMENT,
    EVALUATION,
    PLANE,
    PROMPTS,
    ROLLOUT_PUMP,
    SYNC,
    TRAIN_PUMP,
    TRAINER,
    "finalizer 0",
]
seconds = st.floats(0, 1e5)
names = st.sampled_from(NAMES)
words = st.sampled_from(["working", "waiting"])
groups = st.dictionaries(st.sampled_from([str(state) for state in GroupState]), st.integers(0, 9), max_size=4)
optional_seconds = st.none() | seconds

parts = st.builds(Part, name=names, what=words, seconds=seconds, on=st.just("") | names)
engines = st.builds(
    EngineState,
    name=words,
    state=st.sampled_from([str(state) for state in WorkerState]),
    why=words,
    seconds=seconds,
    outstanding=st.integers(0, 9),
    loading=st.booleans(),
    weight_version=st.none() | st.integers(0, 9),
    running=st.none() | st.integers(0, 9),
    waiting=st.none() | st.integers(0, 9),
    kv_usage=st.none() | st.floats(0, 1),
    no_token_seconds=optional_seconds,
)
permits = st.builds(
    Permits,
    capacity=st.integers(1, 9),
    used=st.integers(0, 9),
    groups=groups,
    may_dispatch=st.booleans(),
    held=st.booleans(),
    selectable=st.booleans(),
)
rollouts = st.builds(
    PlayedRollout,
    id=words,
    seconds=seconds,
    phase=words,
    phase_seconds=seconds,
    on=st.just("") | names,
    at=st.sampled_from(["", "a.py:3 in f"]),
)
graphs = st.builds(
    WaitGraph,
    run=words,
    pid=st.just(1),
    time=seconds,
    doing=words,
    no_progress_seconds=st.sampled_from([0.0, 100.0]),
    ending=st.sampled_from(["", "failed, WorkerDied: gone"]),
    rejections=st.dictionaries(words, st.integers(1, 9), max_size=2),
    processes=st.dictionaries(names, st.integers(1, 9), max_size=2),
    parts=st.lists(parts, max_size=4).map(tuple),
    permits=st.none() | permits,
    slowest=st.lists(rollouts, max_size=3).map(tuple),
    steps=st.lists(
        st.builds(StepHoles, step=st.just(1), wanted=st.just(2), groups=groups, missing=st.just(0)), max_size=2
    ).map(tuple),
    sync=st.none() | st.builds(Sync, version=st.just(1), last_seconds=optional_seconds),
    plane=st.none()
    | st.builds(
        PlaneState,
        round_trip_ms=optional_seconds,
        ago_seconds=optional_seconds,
        open=st.lists(parts, max_size=2).map(tuple),
    ),
    engines=st.lists(engines, max_size=3).map(tuple),
    calls_waiting=st.integers(0, 3),
    loop=st.none()
    | st.builds(
        LoopState,
        silent_seconds=seconds,
        at=words,
        figures=st.just({}),
        stalls=st.just({"here": 2}),
        stood_still_seconds=seconds,
    ),
    unhealthy=st.dictionaries(names, words, max_size=2),
)


@settings(max_examples=200)
@given(graphs)
def test_any_graph_is_told_and_blamed(graph: WaitGraph) -> None:
    found = culprit(graph)
    text = describe(replace(graph, culprit=found))
    blocked = graph.loop is not None and graph.loop.silent_seconds > 1.0
    moves = graph.no_progress_seconds <= 1.0 and not any(part.name == TRAIN_PUMP for part in graph.parts)
    assert (found is None) == (not blocked and (graph.permits is None or moves))
    if found is not None:
        assert f"because of the {found.part}: {found.why}" in text
    for engine in graph.engines:
        assert f"{engine.name}: {engine.state}" in text
