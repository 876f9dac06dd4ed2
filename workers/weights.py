"""A model's weights as one safetensors file: the trainer writes it, every engine reads it, both by the rule below.

The rule: the file holds exactly the tensors of the model's `state_dict`, under their names there, each tensor once. Of tied
tensors (an output head that is the embedding) only the first name is kept, so a model and its file agree whoever wrote it.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from torch import nn


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's persistent tensors by name, tied duplicates left out, in `state_dict` order. They are the live ones."""
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def tensor_names(model: nn.Module) -> list[str]:
    """The names that a weights file of this model has."""
    return list(named_tensors(model))


def save_weights(model: nn.Module, path: Path, *, dtype: torch.dtype | None = None) -> int:
    """Write the model's weights to `path` and return the file's size in bytes; see `save_tensors`.

    `dtype`, if given, is what floating-point tensors are cast to: engines want exactly their own.
    """
    tensors = named_tensors(model)
    if dtype is not None:
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    return save_tensors(tensors, path)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> int:
    """Write tensors to a weights file and return its size in bytes.

    The file appears whole or not at all (temporary name, then rename). Raises OSError when it cannot be written.
    """
    import safetensors.torch

    write = cast(Any, safetensors.torch).save_file
    partial = path.with_name(path.name + ".partial")
    try:
        write({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path.stat().st_size


def expected_tensors(model_path: Path) -> dict[str, torch.Tensor]:
    """What a weights file of the model in `model_path` must hold; on the meta device, without data.

    Blocking. Raises ValueError, OSError, or what else transformers raises for a model that it does not understand.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = cast(Any, AutoConfig).from_pretrained(model_path, local_files_only=True)
    with torch.device("meta"):
        model = cast(Any, AutoModelForCausalLM).from_config(config)
    return named_tensors(model)


def check_tensors(wanted: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], what: str) -> None:
    """Raise ValueError when the names or shapes of `tensors` are not those of `wanted`; `what` names the former."""
    found = {name: (_dtype_code(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    problems = _differences(wanted, found, dtypes=False)
    if problems:
        raise ValueError(f"{what} do not fit the model: {'; '.join(problems)}")


def load_into(model: nn.Module, path: Path) -> None:
    """Copy a weights file into the model, in place.

    Names, shapes and dtypes are all checked before the first tensor is changed: a difference, or a file that is missing or
    no safetensors, raises ValueError naming what is wrong, and the model is as before. An I/O error after that (the file
    was cut while it was read) raises OSError and leaves a mixed model: do not use it.
    """
    import torch
    from safetensors import SafetensorError

    wanted = named_tensors(model)
    with _open_fitting(wanted, path, dtypes=True) as file, torch.no_grad():
        for name, tensor in wanted.items():
            try:
                tensor.copy_(file.get_tensor(name))
            except SafetensorError as error:
                raise OSError(f"weights file {path}: tensor {name}: {error}") from error


def check_file(wanted: dict[str, torch.Tensor], path: Path) -> None:
    """Raise ValueError when the names or shapes in a weights file are not those of `wanted` (`named_tensors` of the model,
    which may be on the meta device). Reads the file's header only."""
    with _open_fitting(wanted, path, dtypes=False):
        pass


@contextmanager
def _open_fitting(wanted: dict[str, torch.Tensor], path: Path, *, dtypes: bool) -> Generator[Any]:
    """The open safetensors file. Raises ValueError naming what keeps it from being the weights `wanted`."""
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(os.fspath(path), framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"weights file {path}: {error}") from error
    with file:
        entries = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        found = {name: (entry.get_dtype(), tuple(entry.get_shape())) for name, entry in entries.items()}
        problems = _differences(wanted, found, dtypes=dtypes)
        if problems:
            raise ValueError(f"weights file {path} does not fit the model: {'; '.join(problems)}")
        yield file


def _differences(
    wanted: Mapping[str, torch.Tensor], found: Mapping[str, tuple[str, tuple[int, ...]]], *, dtypes: bool
) -> list[str]:
    """What keeps `found` (dtype code and shape by name) from being the weights `wanted`."""
    problems = [
        f"{what} {_some(names)}"
        for what, names in (
            ("missing", wanted.keys() - found.keys()),
            ("not in the model", found.keys() - wanted.keys()),
        )
        if names
    ]
    for name in sorted(wanted.keys() & found.keys()):
        there, here = found[name], (_dtype_code(wanted[name].dtype), tuple(wanted[name].shape))
        if there[1] != here[1] or (dtypes and there[0] != here[0]):
            problems.append(f"{name} is {there[0]}{list(there[1])}, the model has {here[0]}{list(here[1])}")
    return problems if len(problems) <= 5 else [*problems[:5], f"and {len(problems) - 5} more"]


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")


def _dtype_code(dtype: torch.dtype) -> str:
    """The dtype's name in a safetensors header, e.g. F32 for torch.float32."""
    name = str(dtype).removeprefix("torch.")
    for word, code in (("bfloat", "BF"), ("float", "F"), ("uint", "U"), ("int", "I")):
        name = name.replace(word, code)
    return name.upper()
