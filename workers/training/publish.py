"""Publishes the policy's weights to the engines: one safetensors file per version, whole or not there."""

from __future__ import annotations

import time
from pathlib import Path

from workers.training.api import Published
from workers.training.disk import space_for
from workers.training.trainer import Trainer
from workers.weights import named_tensors, save_weights


def publish(trainer: Trainer, folder: Path, version: int) -> Published:
    """Write `<folder>/v<version>.safetensors` in the model's dtype, by the naming rule of `workers.weights`.

    Allowed while a step is open: the weights are those of the last finished step. A file of the same version is replaced.
    Raises NoSpace (naming the folder and the need), OutOfOrder (weights lost) or OSError; then no file is left.
    """
    trainer.state.require_weights("publish_weights")
    start = time.perf_counter()
    model = trainer.policy.model
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"v{version}.safetensors"
    with space_for(folder, sum(t.numel() * t.element_size() for t in named_tensors(model).values())):
        size = save_weights(model, path)
    return Published(path=str(path), version=version, bytes=size, seconds=time.perf_counter() - start)
