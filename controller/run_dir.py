"""The run's folder: one run at a time in it, and nothing of an older run is overwritten."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from controller.checkpoint import LATEST, ControllerState, latest, read_state
from controller.config.schema import EvaluationConfig, RunConfig
from controller.locks import try_lock
from controller.reporting.metrics_log import read_evaluations
from ledger.segments import FOLDER as LEDGER

Resume: TypeAlias = Literal["auto", "never"] | Path
"""auto: continue the folder's latest checkpoint if it has one. never: start anew. A path: continue that checkpoint."""

CHECKPOINTS = "checkpoints"
_OURS = ("metrics.jsonl", "evaluations.jsonl", "summary.json", "trace.json", CHECKPOINTS, LEDGER)


class RunDirError(Exception):
    """The run's folder cannot be used as asked; the message says what to do."""


@contextmanager
def open_run_dir(
    config: RunConfig, resume: Resume, evaluation: EvaluationConfig | None = None
) -> Generator[tuple[Path, Path | None]]:
    """The run's folder, locked while inside, and the checkpoint to continue from (None: start anew).

    Blocking (file I/O). When a run starts anew where an older one left files, the old folder is renamed to `<dir>.<n>`.
    A finished run is opened again only where its last `evaluation` is missing. Raises RunDirError, CheckpointError.
    """
    folder = Path(config.dir)
    try:
        checkpoint = _prepare(folder, resume)
    except OSError as e:
        raise RunDirError(f"run.dir: {folder} cannot be used: {e}") from e
    with _lock(folder):
        if checkpoint is not None:
            state = read_state(checkpoint)
            evaluates = evaluation is not None and evaluation.questions is not None
            _check(config, checkpoint, state, left_to_do=evaluates and not _is_evaluated(folder, state.step))
        yield folder, checkpoint


def _prepare(folder: Path, resume: Resume) -> Path | None:
    """Make the folder, after moving an older run aside if this one starts anew; the checkpoint to continue from."""
    checkpoint = _checkpoint(folder, resume)
    if checkpoint is None and any((folder / name).exists() for name in _OURS):
        with _lock(folder):
            _move_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return checkpoint


def _checkpoint(folder: Path, resume: Resume) -> Path | None:
    match resume:
        case "never":
            return None
        case "auto":
            return latest(folder / CHECKPOINTS)
        case path:
            # A checkpoint itself, or a run's folder, whose latest is meant.
            for candidate in (path, path / CHECKPOINTS):
                if (candidate / LATEST).exists():
                    return latest(candidate)
            return path


def _check(config: RunConfig, checkpoint: Path, state: ControllerState, *, left_to_do: bool) -> None:
    if state.seed != config.seed:
        raise RunDirError(
            f"run.seed is {config.seed}, but {checkpoint} was written with seed {state.seed}: its prompts would come in "
            f"another order. Set run.seed: {state.seed}, or use --resume never to start anew"
        )
    if state.step > config.steps or (state.step == config.steps and not left_to_do):
        raise RunDirError(
            f"the run in {config.dir} is finished: {checkpoint} is of step {state.step}, and run.steps is {config.steps}. "
            "Set run.steps higher to train on, or use --resume never to start anew (the old folder is renamed)"
        )


def _is_evaluated(folder: Path, step: int) -> bool:
    return any(report.step == step for report in read_evaluations(folder))


def _move_aside(folder: Path) -> None:
    n = 1
    while (target := folder.with_name(f"{folder.name}.{n}")).exists():
        n += 1
    folder.rename(target)


@contextmanager
def _lock(folder: Path) -> Generator[None]:
    with try_lock(folder / ".lock") as held:
        if not held:
            raise RunDirError(f"another run is using {folder}; wait for it to end, or set run.dir to another folder")
        yield
