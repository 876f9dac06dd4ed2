"""Where the run stands: the step, the weight version served, whether dispatch is held. Pumps share it, one writer each."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from controller.buffer import ReplayBuffer
from controller.samplers import BufferView


class RunState:
    """The train pump writes `step` and `version`, the rollout pump `exhausted`. Each change wakes the buffer's waiters."""

    def __init__(self, buffer: ReplayBuffer, *, step: int, last_step: int) -> None:
        self._buffer = buffer
        self.step = step
        """The step being trained, or the next one (0-based); also how many steps are done."""
        self.version = step
        """Weight version that the engines serve: version s is what step s starts from."""
        self.last_step = last_step
        self.exhausted = False
        self._holds = 0

    @property
    def dispatch_held(self) -> bool:
        return self._holds > 0

    @contextmanager
    def hold_dispatch(self) -> Generator[None]:
        """No group is dispatched inside; in-flight generation goes on. Holds nest."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._buffer.notify()

    def step_done(self) -> None:
        self.step += 1
        self._buffer.notify()

    def serve(self, version: int) -> None:
        """Every engine in service has acknowledged `version`."""
        if version < self.version:
            raise ValueError(f"weight version went back from {self.version} to {version}")
        self.version = version
        self._buffer.notify()

    def exhaust(self) -> None:
        self.exhausted = True
        self._buffer.notify()

    def view(self) -> BufferView:
        return BufferView(
            step=self.step,
            version=self.version,
            last_step=self.last_step,
            entries=self._buffer.entries,
            exhausted=self.exhausted,
            dropped=self._buffer.dropped_for,
        )
