"""Publishes the policy's weights to the engines, by the configured transport: a whole version, or nothing of it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor

from workers.training.api import Published
from workers.training.errors import BadWeights
from workers.training.trainer import Trainer
from workers.weight_sync.transport import WeightPublisher
from workers.weights import check_tensors, named_tensors


def publish(
    trainer: Trainer, publisher: WeightPublisher, version: int, wanted: Mapping[str, Tensor] | None = None
) -> Published:
    """Publish the weights in the model's dtype, by the naming rule of `workers.weights`.

    Allowed while a step is open: the weights are those of the last finished step. `wanted`, if given, are the tensors that
    engines expect. Raises BadWeights when those are others than the trainer's, OutOfOrder (weights lost), or what the
    publisher does; then there is nothing of the version.
    """
    trainer.state.require_weights("publish_weights")
    start = time.perf_counter()
    weights = named_tensors(trainer.policy.model)
    if wanted is not None:
        try:
            check_tensors(wanted, weights, "the trainer's weights")
        except ValueError as error:
            raise BadWeights(str(error)) from error
    address = publisher.publish(weights, version)
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    return Published(address=address, version=version, bytes=size, seconds=time.perf_counter() - start)
