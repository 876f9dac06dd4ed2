"""A checkpoint is whole or absent, also when the one before it was cancelled while the trainer wrote."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from controller.checkpoint import Checkpoints, ControllerState, latest
from workers.training.api import StatePath

pytestmark = pytest.mark.anyio

STATE = ControllerState(step=7, drawn=9, pending=(), next_group=3, rollouts={}, groups={}, seed=0)


class Trainer:
    """Saves in a thread, one state after the other, and to its end whoever has left meanwhile: as the worker does. The first
    one goes on when the second is asked for."""

    def __init__(self) -> None:
        self.saving = anyio.Event()
        self._goes_on = threading.Event()
        self._one_at_a_time = threading.Lock()

    async def call(self, _method: object, request: StatePath, **_: Any) -> None:
        if self.saving.is_set():
            self._goes_on.set()
        await anyio.to_thread.run_sync(self._save, Path(request.path), abandon_on_cancel=True)

    def _save(self, path: Path) -> None:
        with self._one_at_a_time:
            anyio.from_thread.run_sync(self.saving.set)
            self._goes_on.wait(10)
            assert not path.exists()
            path.mkdir(parents=True)
            (path / "state").write_text("whole")


async def test_a_save_that_was_cancelled_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    trainer: Any = Trainer()
    checkpoints = Checkpoints(tmp_path, keep=1, trainer=trainer, timeout_s=10.0)
    async with anyio.create_task_group() as tg:
        tg.start_soon(checkpoints.save, STATE)
        await trainer.saving.wait()
        tg.cancel_scope.cancel()
    saved = await checkpoints.save(STATE)
    assert saved == latest(tmp_path)
    assert (saved / "trainer" / "state").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-000007"]
