"""Checkpoints: one consistent cut of the run at a step boundary, complete or absent on disk.

A checkpoint is a folder `step-NNNNNN` with the trainer's state and `controller.json`. It is written under a temporary name,
fsynced and renamed; `LATEST` is moved last. In-flight groups are not saved: their prompts are, and are dispatched again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import anyio.to_thread
import msgspec

from workers.environments.base import Prompt
from workers.rpc.client import RpcClient
from workers.training.api import LOAD, SAVE, StatePath, TrainerInfo

LATEST = "LATEST"
_WRITING = ".writing-"
_MAX_BYTES = 256 * 1024 * 1024


class CheckpointError(Exception):
    """A checkpoint is missing, incomplete, or of another format."""


class ControllerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The controller's share of a checkpoint."""

    format: Literal[1] = 1
    step: int
    """Steps done; also the weight version."""
    drawn: int
    """Prompts drawn from the iterator."""
    pending: tuple[Prompt, ...]
    """Prompts drawn and not ended: in flight, ready, or held. Dispatched first on resume."""
    next_group: int
    rollouts: Mapping[str, int]
    """Rollouts so far by end (trained, evicted, dropped, aborted)."""
    groups: Mapping[str, int]
    """Groups likewise."""
    seed: int


class Checkpoints:
    """Writes and reads the checkpoints of one run folder."""

    def __init__(self, folder: Path, *, keep: int, trainer: RpcClient, timeout_s: float) -> None:
        self._folder = folder
        self._keep = keep
        self._trainer = trainer
        self._timeout_s = timeout_s
        self._saves = 0

    async def save(self, state: ControllerState) -> Path:
        """Write a checkpoint and return its folder; one of the same step is kept as it is.

        Cancelled in the middle, a temporary folder is left, which the next save removes.
        """
        final = self._folder / f"step-{state.step:06d}"
        if await anyio.to_thread.run_sync(final.exists):
            return final
        # A folder of its own: the trainer may still be writing to that of a save that was cancelled.
        self._saves += 1
        temp = self._folder / f"{_WRITING}{final.name}-{self._saves}"
        await anyio.to_thread.run_sync(_fresh, self._folder, temp)
        await self._trainer.call(SAVE, StatePath(path=str((temp / "trainer").absolute())), timeout=self._timeout_s)
        await anyio.to_thread.run_sync(_publish, self._folder, temp, final, state, self._keep)
        return final

    async def load(self, folder: Path) -> ControllerState:
        """Restore the trainer from `folder` and return the controller's state. Raises CheckpointError."""
        state = await anyio.to_thread.run_sync(read_state, folder)
        path = StatePath(path=str((folder / "trainer").absolute()))
        info: TrainerInfo = await self._trainer.call(LOAD, path, timeout=self._timeout_s)
        if info.step != state.step:
            raise CheckpointError(
                f"{folder}: the trainer's state is of step {info.step}, the controller's of {state.step}"
            )
        return state


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in a run's checkpoint folder. Raises CheckpointError when LATEST points nowhere."""
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    target = folder / name
    if target.parent != folder or not (target / "controller.json").is_file():
        raise CheckpointError(
            f"{folder / LATEST} names {name!r}, which is not a checkpoint there; "
            "give --resume PATH with one of the step-* folders, or --resume never"
        )
    return target


def read_state(folder: Path) -> ControllerState:
    """Decode a checkpoint's `controller.json`. Raises CheckpointError naming the file and the fault."""
    path = folder / "controller.json"
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise CheckpointError(f"{path}: {size} bytes; a controller state is at most {_MAX_BYTES}")
        return msgspec.json.decode(path.read_bytes(), type=ControllerState)
    except OSError as e:
        raise CheckpointError(f"{folder} is not a checkpoint: {e}") from e
    except msgspec.DecodeError as e:
        raise CheckpointError(f"{path}: {e}") from e


def _fresh(folder: Path, temp: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(folder)
    temp.mkdir()


def _remove_unfinished(folder: Path) -> None:
    """What saves left that did not come to their end. What is still being written to one of them is removed by the next."""
    for stale in folder.glob(f"{_WRITING}*"):
        shutil.rmtree(stale, ignore_errors=True)


def _publish(folder: Path, temp: Path, final: Path, state: ControllerState, keep: int) -> None:
    _write(temp / "controller.json", msgspec.json.format(msgspec.json.encode(state)))
    _sync_dir(temp)
    temp.rename(final)
    _write(folder / f".{LATEST}", f"{final.name}\n".encode())
    (folder / f".{LATEST}").replace(folder / LATEST)
    _sync_dir(folder)
    _remove_unfinished(folder)
    for old in sorted(folder.glob("step-*"))[:-keep]:
        if old != final:
            shutil.rmtree(old)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _sync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
