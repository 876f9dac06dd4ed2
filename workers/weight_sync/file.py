"""Weights as one safetensors file in a folder that trainer and engines see: in shared memory, on one machine."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from workers.training.disk import space_for
from workers.weight_sync.spec import WeightSyncSpec
from workers.weights import save_tensors

if TYPE_CHECKING:
    from torch import Tensor


class FileTransport:
    """The address is the file's path. The trainer keeps the last two versions' files."""

    def __init__(self, spec: WeightSyncSpec) -> None:
        """Raises OSError when the trainer's folder cannot be made."""
        self._folder = Path(spec.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: list[Path] = []

    def publish(self, weights: Mapping[str, Tensor], version: int) -> str:
        """See `WeightPublisher.publish`. Raises NoSpace (naming the folder and the need) or OSError."""
        path = self._folder / f"v{version}.safetensors"
        while len(self._files) > 1:
            self._files.pop(0).unlink(missing_ok=True)
        with space_for(self._folder, sum(t.numel() * t.element_size() for t in weights.values())):
            save_tensors(weights, path)
        if path not in self._files:
            self._files.append(path)
        return str(path)

    @contextmanager
    def receive(self, address: str, version: int, *, timeout_s: float) -> Generator[Path]:
        """See `WeightTransport.receive`. A file that is missing is found out by whoever opens it."""
        yield Path(address)

    def close(self) -> None:
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()
