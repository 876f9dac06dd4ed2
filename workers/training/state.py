"""Checkpoints of a trainer: a Hugging Face model directory that any tool loads, with a `trainer/` folder inside.

`trainer/state.safetensors` holds master weights, AdamW moments and RNG state, so that a loaded trainer's next step is bit
for bit the one an uninterrupted trainer takes. `trainer/state.json` holds the step and every file's size and SHA-256.
Nothing is pickled. The folder appears whole or not at all.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import msgspec
import safetensors.torch
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.training.disk import sha256, space_for, sync, sync_tree
from workers.training.errors import BadCheckpoint
from workers.training.trainer import Trainer

FORMAT = 1
STATE_JSON = "trainer/state.json"
STATE_TENSORS = "trainer/state.safetensors"
MAX_JSON_BYTES = 16 << 20
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps per parameter once that has been updated."""
COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
"""Tokenizer, chat template and generation settings; never weights or code."""


class FileDigest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    bytes: int
    sha256: str


class TrainerState(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of `trainer/state.json`."""

    format: int
    step: int
    """The next step to train."""
    files: dict[str, FileDigest]
    """Every other file of the checkpoint, by its path in it."""


def save(trainer: Trainer, path: Path, *, model_path: Path) -> None:
    """Write a checkpoint to `path`, which must not exist. Tokenizer files are copied from `model_path` as they are.

    While a step is open, what is saved is the state before that step, and the step goes on: only `finish_step` moves
    weights. Raises BadCheckpoint, NoSpace, OutOfOrder (weights lost) or OSError; then `path` does not exist.
    """
    trainer.state.require_weights("save")
    if path.exists():
        raise BadCheckpoint(f"save: {path} exists already")
    tensors, model = _tensors(trainer), trainer.policy.model
    need = sum(t.numel() * t.element_size() for t in (*tensors.values(), *model.state_dict().values()))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a save that was killed
    try:
        with space_for(path.parent, need):
            (partial / STATE_JSON).parent.mkdir(parents=True)
            cast(Any, model).save_pretrained(partial)
            _copy_tokenizer(model_path, partial)
            safetensors.torch.save_file(tensors, partial / STATE_TENSORS)
            digests = {
                name: FileDigest(bytes=file.stat().st_size, sha256=sha256(file))
                for name, file in _files(partial).items()
            }
            state = TrainerState(format=FORMAT, step=trainer.state.step, files=digests)
            (partial / STATE_JSON).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
            sync_tree(partial)
            partial.rename(path)
            sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load(trainer: Trainer, path: Path) -> None:
    """Replace weights, moments, RNG and step by those of the checkpoint; an open step is dropped.

    Everything is checked first: on BadCheckpoint the trainer is as before.
    """
    state = _read_state(path)
    try:
        file: Any = safe_open(path / STATE_TENSORS, framework="pt", device="cpu")
    except SafetensorError as error:
        raise BadCheckpoint(f"load: {path / STATE_TENSORS}: {error}") from error
    with file:
        _check_tensors(trainer, file, path)
        with trainer.state.moves_weights():
            _restore(trainer, file)
    trainer.drop_step(state.step)


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    tensors = {"rng.cpu": torch.get_rng_state()}
    if trainer.policy.device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(trainer.policy.device)
    for name, master in trainer.policy.masters.items():
        tensors[f"master.{name}"] = master.detach().contiguous()
        kept = trainer.optimizer.state.get(master, {})
        tensors.update((f"{moment}.{name}", kept[moment].contiguous()) for moment in MOMENTS if kept)
    return tensors


def _restore(trainer: Trainer, file: Any) -> None:
    names: set[str] = set(file.keys())
    trainer.optimizer.state.clear()
    with torch.no_grad():
        for name, master in trainer.policy.masters.items():
            master.copy_(file.get_tensor(f"master.{name}"))
            if f"step.{name}" in names:
                trainer.optimizer.state[master] = {
                    moment: file.get_tensor(f"{moment}.{name}").to(master.device) for moment in MOMENTS
                }
    trainer.policy.refresh()
    torch.set_rng_state(file.get_tensor("rng.cpu"))
    if trainer.policy.device.type == "cuda" and "rng.cuda" in names:
        torch.cuda.set_rng_state(file.get_tensor("rng.cuda"), trainer.policy.device)


def _check_tensors(trainer: Trainer, file: Any, path: Path) -> None:
    """Raise BadCheckpoint unless the open safetensors file has this model's tensors, with their shapes and dtypes."""
    expected: dict[str, Tensor] = {"rng.cpu": torch.get_rng_state()}
    optional: dict[str, Tensor] = {}
    for name, master in trainer.policy.masters.items():
        expected[f"master.{name}"] = master
        optional |= {f"exp_avg.{name}": master, f"exp_avg_sq.{name}": master, f"step.{name}": torch.zeros(())}
    names: set[str] = set(file.keys())
    problems = [f"{name} is missing" for name in sorted(expected.keys() - names)]
    problems += [
        f"{name} is not this model's" for name in sorted(names - expected.keys() - optional.keys() - {"rng.cuda"})
    ]
    for name, like in (expected | optional).items():
        if name in names:
            tensor = file.get_tensor(name)
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                problems.append(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}, this model has {like.dtype} {list(like.shape)}"
                )
    for name in trainer.policy.masters:
        if len({f"{moment}.{name}" for moment in MOMENTS} & names) not in (0, len(MOMENTS)):
            problems.append(f"{name} has some of its moments only")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise BadCheckpoint(f"load: {path / STATE_TENSORS} does not fit the model: {'; '.join(problems[:5])}{more}")


def _read_state(path: Path) -> TrainerState:
    """Decode `trainer/state.json` and check every file that it lists."""
    where = path / STATE_JSON
    files = _files(path)
    if STATE_JSON not in files:
        raise BadCheckpoint(f"load: {path} is no trainer checkpoint: it has no {STATE_JSON}")
    if where.stat().st_size > MAX_JSON_BYTES:
        raise BadCheckpoint(f"load: {where} has {where.stat().st_size} bytes, at most {MAX_JSON_BYTES} are read")
    try:
        state = msgspec.json.decode(where.read_bytes(), type=TrainerState)
    except msgspec.MsgspecError as error:
        raise BadCheckpoint(f"load: {where}: {error}") from error
    if state.format != FORMAT or state.step < 0:
        raise BadCheckpoint(
            f"load: {where}: format {state.format}, step {state.step}; format {FORMAT}, step >= 0 are read"
        )
    if STATE_TENSORS not in state.files:
        raise BadCheckpoint(f"load: {where} does not list {STATE_TENSORS}")
    for name, digest in state.files.items():
        if name not in files:
            raise BadCheckpoint(f"load: {path} lacks its file {name}")
        size = files[name].stat().st_size
        if size != digest.bytes:
            raise BadCheckpoint(f"load: {files[name]} has {size} bytes, {digest.bytes} were saved")
        if sha256(files[name]) != digest.sha256:
            raise BadCheckpoint(f"load: {files[name]} is corrupted: its SHA-256 is not the one that was saved")
    return state


def _files(folder: Path) -> dict[str, Path]:
    """Every file below the folder, by its path in it."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _copy_tokenizer(source: Path, target: Path) -> None:
    for file in source.iterdir():
        copied = file.suffix in COPIED_SUFFIXES and not file.name.endswith(".index.json")
        if copied and file.is_file() and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
