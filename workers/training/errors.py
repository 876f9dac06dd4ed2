"""The trainer's error tree. Each text names the place, the value and what is allowed.

TrainingError
├── OutOfOrder     a call that does not fit the state of the step
├── BadTrainRow    a row is not what was announced, or cannot be trained on
├── NonFinite      a loss or gradient is not a finite number; no weight has moved
├── BadWeights     the trainer's tensors are not those of the model
├── BadCheckpoint  a folder cannot be saved to, or does not hold this model's state
└── NoSpace        a file system cannot take what is to be written
"""

from __future__ import annotations


class TrainingError(Exception):
    """Base of all training errors."""


class OutOfOrder(TrainingError):
    """The step API was called out of order; the call changed nothing."""


class BadTrainRow(TrainingError):
    """A row is not what the controller announced, or cannot be trained on; nothing of its microbatch was trained."""


class NonFinite(TrainingError):
    """A loss or gradient is infinite or NaN. The step is broken; the weights are those it began with."""


class BadCheckpoint(TrainingError):
    """The folder cannot be saved to, or its content is not this model's state."""


class BadWeights(TrainingError):
    """The trainer's tensors are not those of the model that the engines serve; nothing was published."""


class NoSpace(TrainingError):
    """Too little free space for a file; nothing was written."""
