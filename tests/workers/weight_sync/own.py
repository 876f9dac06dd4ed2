"""A transport of one's own, as a user would write it: weights go through a folder that both sides know by an argument."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


class FolderTransport:
    def __init__(self, folder: str, delay_s: float = 0.0) -> None:
        self.folder = Path(folder)
        self.delay_s = delay_s
        self.open = 0

    def publish(self, weights: Mapping[str, Tensor], version: int) -> str:
        path = self.folder / f"step-{version}"
        save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, path)
        return path.name

    @contextmanager
    def receive(self, address: str, version: int, *, timeout_s: float) -> Iterator[Path]:
        time.sleep(self.delay_s)
        path = self.folder / address
        if not path.exists():
            raise RuntimeError(f"step {version} has not come")
        self.open += 1
        yield path
        self.open -= 1

    def close(self) -> None:
        pass


class HalfTransport:
    def publish(self, weights: Mapping[str, Tensor], version: int) -> str:
        return ""
