"""What a Hugging Face model directory says about its model, read from its JSON and its safetensors headers alone.

Nothing of it is run and no tensor is read, so a missing file, a download that was cut off, or a Git LFS pointer shows before
any worker starts.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

_MAX_JSON = 64 << 20
_MAX_HEADER = 100 << 20  # the format's own limit
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("vocab.txt",))
_UNREADABLE = (OSError, ValueError, RecursionError)

S = TypeVar("S", bound=Struct)


class ModelFacts(Struct, frozen=True, kw_only=True):
    architecture: str
    context: int | None
    """Longest sequence the model was made for, in tokens; None when its config.json does not say."""
    parameters: int
    """Elements of all stored tensors."""


class Fault(Struct, frozen=True):
    """Something that keeps the directory from being used."""

    what: str
    remedy: str = ""


def inspect_model(folder: Path) -> tuple[ModelFacts | None, list[Fault]]:
    """The facts of a model directory that exists, and its faults; facts are None when a fault hides them."""
    faults: list[Fault] = []
    parameters = _parameters(folder, faults)
    if faults:
        parameters = None
    config = _config(folder, faults)
    if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS):
        faults.append(Fault("has no tokenizer", "put it there with AutoTokenizer.from_pretrained(...).save_pretrained"))
    elif not _has_chat_template(folder):
        faults.append(
            Fault(
                "has no chat template, so messages cannot be turned into tokens",
                "take an instruction-tuned model, or put a chat_template.jinja there",
            )
        )
    if config is None or parameters is None:
        return None, faults
    name = (*config.architectures, config.model_type)[0]
    return ModelFacts(architecture=name, context=config.context, parameters=parameters), faults


class _TextConfig(Struct):
    max_position_embeddings: int | None = None
    n_positions: int | None = None

    @property
    def context(self) -> int | None:
        return self.max_position_embeddings or self.n_positions


class _ModelConfig(_TextConfig):
    architectures: tuple[str, ...] = ()
    model_type: str = "unknown"
    text_config: _TextConfig | None = None
    """Of models that also see."""

    @property
    def context(self) -> int | None:
        return super().context or (self.text_config.context if self.text_config else None)


class _TokenizerConfig(Struct):
    chat_template: Any = None


class _Index(Struct):
    weight_map: dict[str, str]


class _Tensor(Struct):
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _config(folder: Path, faults: list[Fault]) -> _ModelConfig | None:
    try:
        return _read(folder / "config.json", _ModelConfig)
    except FileNotFoundError:
        faults.append(Fault("has no config.json", "a model directory is what save_pretrained writes"))
    except _UNREADABLE as e:
        faults.append(Fault(f"has a config.json that cannot be read: {e}", "download it again"))
    return None


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return bool(_read(folder / "tokenizer_config.json", _TokenizerConfig).chat_template)
    except _UNREADABLE:
        return False


def _parameters(folder: Path, faults: list[Fault]) -> int:
    """Elements of all tensors, as far as the weights files can be read."""
    try:
        files = {folder / name for name in _read(folder / "model.safetensors.index.json", _Index).weight_map.values()}
    except FileNotFoundError:
        files = set(folder.glob("*.safetensors"))
    except _UNREADABLE as e:
        faults.append(Fault(f"has a model.safetensors.index.json that cannot be read: {e}", "download it again"))
        return 0
    if not files:
        faults.append(Fault("has no *.safetensors (pickled weights are not loaded)", "save_pretrained writes them"))
    total = 0
    for file in sorted(files):
        try:
            total += _elements(file)
        except FileNotFoundError:
            faults.append(Fault(f"has no {file.name}, which its index names", "download it again"))
        except _UNREADABLE as e:
            remedy = "download it again; in a git clone, `git lfs pull`"
            faults.append(Fault(f"has a damaged {file.name}: {e}", remedy))
    return total


def _elements(file: Path) -> int:
    """Elements of a file's tensors. Raises ValueError when header and file size do not agree with the format."""
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"its {size} bytes are not safetensors")
        header = msgspec.json.decode(f.read(length), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    tensors = [msgspec.json.decode(raw, type=_Tensor) for raw in header.values()]
    end = 8 + length + max((t.data_offsets[1] for t in tensors), default=0)
    if end != size:
        raise ValueError(f"it has {size} bytes and by its header {end}")
    return sum(math.prod(t.shape) for t in tensors)


def _read(path: Path, struct: type[S]) -> S:
    with path.open("rb") as file:
        content = file.read(_MAX_JSON + 1)
    if len(content) > _MAX_JSON:
        raise ValueError(f"it is larger than {_MAX_JSON >> 20} MiB")
    return msgspec.json.decode(content, type=struct)
