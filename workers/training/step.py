"""The order of the step API as a state machine, without tensors: no row trained twice, none left out, none after a failure.

IDLE --begin--> OPEN --finish--> IDLE (next step)
OPEN --a failure before the optimizer moves--> BROKEN --begin with restart--> OPEN
any  --a failure while weights move--> LOST --load--> IDLE

In IDLE, OPEN and BROKEN the weights are those of the last finished step. In LOST they are unknown.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from workers.training.api import BeginStep, Microbatch
from workers.training.errors import OutOfOrder


class Phase(Enum):
    IDLE = "idle"
    OPEN = "open"
    BROKEN = "broken"
    LOST = "lost"


@dataclass
class _Trained:
    """What the open step has trained so far."""

    indices: set[int] = field(default_factory=set[int])
    keys: set[str] = field(default_factory=set[str])
    tokens: int = 0


class StepState:
    """Where the trainer stands. Every method raises OutOfOrder, and changes nothing, when it does not fit."""

    def __init__(self) -> None:
        self._phase = Phase.IDLE
        self._step = 0
        self._begun = BeginStep(step=0, loss_tokens=0, sequences=0)
        self._trained = _Trained()
        self._cause = ""

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def step(self) -> int:
        """The step that is open, or the next one."""
        return self._step

    @property
    def begun(self) -> BeginStep:
        """The totals of the open step."""
        return self._begun

    def begin(self, request: BeginStep) -> None:
        self.require_weights("begin_step")
        self.require_current("begin_step", request.step)
        if self._phase is not Phase.IDLE and not request.restart:
            raise OutOfOrder(f"begin_step: step {self._step} is {self._now()}; restart=True drops what it has added up")
        if request.loss_tokens < 1 or request.sequences < 1:
            raise OutOfOrder(
                f"begin_step: step {request.step} has {request.loss_tokens} loss tokens in {request.sequences} sequences; "
                "both must be at least 1"
            )
        self._phase, self._begun, self._trained, self._cause = Phase.OPEN, request, _Trained(), ""

    def admit(self, request: Microbatch) -> None:
        """Check that this microbatch may be trained now."""
        self._require_open("train_microbatch", request.step)
        where = f"train_microbatch: microbatch {request.index} of step {self._step}"
        keys = [row.key for row in request.rows]
        if not keys:
            raise OutOfOrder(f"{where} has no rows")
        if request.index in self._trained.indices:
            raise OutOfOrder(f"{where} is trained already (was its reply lost?)")
        repeated = sorted(key for key in set(keys) if key in self._trained.keys or keys.count(key) > 1)
        if repeated:
            raise OutOfOrder(f"{where}: {len(repeated)} of its rows would be trained twice, e.g. {repeated[0]!r}")

    def trained(self, request: Microbatch, tokens: int) -> None:
        """Its gradient is in."""
        self._trained.indices.add(request.index)
        self._trained.keys.update(row.key for row in request.rows)
        self._trained.tokens += tokens

    def require_complete(self, step: int) -> None:
        """Check that the open step has all its rows, so that its normalisers were right."""
        self._require_open("finish_step", step)
        begun, trained = self._begun, self._trained
        if (trained.tokens, len(trained.keys)) != (begun.loss_tokens, begun.sequences):
            raise OutOfOrder(
                f"finish_step: step {step} was begun with {begun.loss_tokens} loss tokens in {begun.sequences} sequences, "
                f"but its {len(trained.indices)} microbatch(es) had {trained.tokens} in {len(trained.keys)}"
            )

    def finished(self) -> None:
        self.reset(self._step + 1)

    def reset(self, step: int) -> None:
        """Whole weights are in place, and `step` is next."""
        self._phase, self._step, self._cause = Phase.IDLE, step, ""

    @contextmanager
    def breaks_step(self) -> Generator[None]:
        """An exception inside leaves the open step BROKEN: its gradients may be half added."""
        try:
            yield
        except BaseException as error:
            self._phase, self._cause = Phase.BROKEN, f"{type(error).__name__}: {error}"
            raise

    @contextmanager
    def moves_weights(self) -> Generator[None]:
        """An exception inside leaves the weights LOST."""
        try:
            yield
        except BaseException as error:
            self._phase, self._cause = Phase.LOST, f"{type(error).__name__}: {error}"
            raise

    def require_weights(self, call: str) -> None:
        """Check that the weights are those of a finished step."""
        if self._phase is Phase.LOST:
            raise OutOfOrder(f"{call}: the weights are {self._now()}; only load helps")

    def require_current(self, call: str, step: int) -> None:
        if step != self._step:
            raise OutOfOrder(f"{call}: step {step} is out of order, step {self._step} is {self._now()}")

    def _require_open(self, call: str, step: int) -> None:
        self.require_weights(call)
        self.require_current(call, step)
        if self._phase is not Phase.OPEN:
            raise OutOfOrder(f"{call}: step {step} is {self._now()}")

    def _now(self) -> str:
        if self._phase is Phase.IDLE:
            return "next and not begun"
        return self._phase.value + (f" ({self._cause})" if self._cause else "")
