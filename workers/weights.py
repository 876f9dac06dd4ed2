"""A model's weights as one safetensors file: the trainer writes it, every engine reads it, both by the rule below.

The rule: the file holds exactly the tensors of the model's `state_dict`, under their names there, each tensor once. Of tied
tensors (an output head that is the embedding) only the first name is kept, so a model and its file agree whoever wrote it.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
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
    """Write the model's weights to `path` and return the file's size in bytes.

    The file appears whole or not at all (temporary name, then rename). `dtype`, if given, is what floating-point tensors
    are cast to: engines want exactly their own. Raises OSError when it cannot be written.
    """
    import safetensors.torch

    write = cast(Any, safetensors.torch).save_file

    def stored(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        return tensor.contiguous()

    partial = path.with_name(path.name + ".partial")
    try:
        write({name: stored(tensor) for name, tensor in named_tensors(model).items()}, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path.stat().st_size


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
        problems = _differences(wanted, file, dtypes)
        if problems:
            raise ValueError(f"weights file {path} does not fit the model: {'; '.join(problems)}")
        yield file


def _differences(wanted: dict[str, torch.Tensor], file: Any, dtypes: bool) -> list[str]:
    """What keeps the open safetensors `file` from being the weights `wanted`."""
    names = set[str](file.keys())
    problems = [
        f"{what} {_some(found)}"
        for what, found in (("missing", wanted.keys() - names), ("not in the model", names - wanted.keys()))
        if found
    ]
    for name in sorted(wanted.keys() & names):
        entry, tensor = file.get_slice(name), wanted[name]
        there, here = (entry.get_dtype(), tuple(entry.get_shape())), (_dtype_code(tensor.dtype), tuple(tensor.shape))
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
