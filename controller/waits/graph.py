"""The wait graph as data: one moment of a run, in JSON under `GET /debug/waits`. Times are seconds up to that moment."""

from __future__ import annotations

from msgspec import Struct


class Part(Struct, frozen=True, kw_only=True):
    """A part of the controller and what it has been doing for `seconds`; `on` is the part it waits for."""

    name: str
    what: str
    seconds: float
    on: str = ""


class Permits(Struct, frozen=True, kw_only=True):
    """The replay buffer's slots, one a live group, and who may take one."""

    capacity: int
    used: int
    groups: dict[str, int]
    """Live groups by state."""
    may_dispatch: bool
    """A slot is free, dispatch is not held, and the sampler admits a group."""
    held: bool
    """Dispatch is held while weights are synchronised."""
    selectable: bool
    """The sampler has a whole step."""


class PlayedRollout(Struct, frozen=True, kw_only=True):
    id: str
    seconds: float
    """Since it was opened."""
    phase: str
    phase_seconds: float
    on: str
    at: str = ""
    """Where the environment's code stands."""


class StepHoles(Struct, frozen=True, kw_only=True):
    """A step that groups are dispatched for: how many it takes, where they are, and how many are not there at all."""

    step: int
    wanted: int
    groups: dict[str, int]
    missing: int


class Sync(Struct, frozen=True, kw_only=True):
    version: int
    """That is served."""
    last_seconds: float | None
    """How long the last synchronisation took."""


class PlaneState(Struct, frozen=True, kw_only=True):
    round_trip_ms: float | None
    """The last finished operation."""
    ago_seconds: float | None
    open: tuple[Part, ...]
    """Operations that have not been answered, the oldest first."""


class EngineState(Struct, frozen=True, kw_only=True):
    name: str
    state: str
    why: str
    seconds: float
    """In this state."""
    outstanding: int
    """Calls given to it."""
    loading: bool
    """New weights."""
    weight_version: int | None
    running: int | None = None
    """By its last answer to a probe, as the rest; None before the first."""
    waiting: int | None = None
    kv_usage: float | None = None
    no_token_seconds: float | None = None
    """While requests are in it."""


class LoopState(Struct, frozen=True, kw_only=True):
    silent_seconds: float
    """How long it has not run what is due."""
    at: str
    """What its thread is at, when it is silent."""
    figures: dict[str, float]
    """Its lag since the start, in ms; see `controller.sentinel.lag`."""
    stalls: dict[str, int]
    """By culprit."""
    stood_still_seconds: float
    """The whole process was stopped, or had no CPU."""


class Culprit(Struct, frozen=True, kw_only=True):
    part: str
    why: str

    def __str__(self) -> str:
        return f"{self.part}: {self.why}"


class WaitGraph(Struct, frozen=True, kw_only=True):
    run: str
    pid: int
    time: float
    """Unix time."""
    doing: str
    """What the controller as a whole does."""
    ending: str = ""
    """Why the run ends, once it does."""
    step: int = 0
    last_step: int = 0
    groups_committed: int = 0
    no_progress_seconds: float = 0.0
    """Since a group was committed or a step done."""
    environment: str = ""
    parts: tuple[Part, ...] = ()
    """The longest first."""
    permits: Permits | None = None
    rollouts: int = 0
    slowest: tuple[PlayedRollout, ...] = ()
    rejections: dict[str, int] = {}
    """Rollouts that could not be trained so far, by reason code."""
    steps: tuple[StepHoles, ...] = ()
    sync: Sync | None = None
    plane: PlaneState | None = None
    engines: tuple[EngineState, ...] = ()
    processes: dict[str, int] = {}
    """Ids of the run's processes on this machine, by name."""
    calls_waiting: int = 0
    """Model calls that wait for an engine with room."""
    loop: LoopState | None = None
    unhealthy: dict[str, str] = {}
    """Health checks that fail, and what they say."""
    culprit: Culprit | None = None
    """What is likely to hold everything up. Only worth reading when nothing moves."""
