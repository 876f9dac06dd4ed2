"""Rows, batches and trainers on tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workers.training.api import BeginStep, LossSpec, Microbatch, OptimizerSpec, StepMetrics, TrainRow
from workers.training.model import Policy, load_model
from workers.training.rows import Batch, collate
from workers.training.trainer import Trainer

CPU = torch.device("cpu")
VOCAB = 103
Rows = dict[str, dict[str, Any]]


def random_rows(count: int, *, seed: int = 0, longest: int = 14) -> Rows:
    """Rows of 3 to `longest` tokens; some loss masks have holes, as those of a conversation with several turns."""
    rng = np.random.default_rng(seed)
    rows: Rows = {}
    for i in range(count):
        length = int(rng.integers(3, longest + 1))
        mask = (rng.random(length) < 0.6).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        rows[f"row-{i}"] = {
            "input_ids": rng.integers(0, VOCAB, length),
            "loss_mask": mask,
            "rollout_logprobs": (mask * -rng.uniform(0.5, 9.0, length)).astype(np.float32),
            "weight_versions": np.zeros(length, np.int64),
        }
    return rows


def train_rows(rows: Rows, *, seed: int = 0) -> list[TrainRow]:
    rng = np.random.default_rng(seed)
    return [
        TrainRow(key=k, advantage=float(rng.normal()), length=len(r["input_ids"]), weight=float(rng.uniform(0.1, 2)))
        for k, r in rows.items()
    ]


def batch_of(rows: Rows, keys: Sequence[str] | None = None) -> Batch:
    keys = list(rows) if keys is None else keys
    return collate(keys, [rows[key] for key in keys], vocab_size=VOCAB, device=CPU)


def begin(step: int, rows: Rows, **changes: Any) -> BeginStep:
    tokens = int(sum(row["loss_mask"].sum() for row in rows.values()))
    return BeginStep(step=step, loss_tokens=tokens, sequences=len(rows), **changes)


def make_trainer(
    model: Path,
    *,
    dtype: torch.dtype = torch.float64,
    optimizer: OptimizerSpec | None = None,
    loss: LossSpec | None = None,
    temperature: float = 1.0,
    max_tokens: int = 20,
    reference: Any = None,
) -> Trainer:
    loss = loss or LossSpec()
    if loss.kl_coef and reference is None:
        reference = load_model(str(model), dtype, CPU)
    return Trainer(
        Policy(load_model(str(model), dtype, CPU)),
        optimizer=optimizer or OptimizerSpec(lr=1e-3),
        loss=loss,
        temperature=temperature,
        max_completion_tokens=max_tokens,
        reference=reference,
    )


def add_microbatches(trainer: Trainer, step: int, rows: Rows, announced: Sequence[Sequence[TrainRow]]) -> None:
    for index, part in enumerate(announced):
        request = Microbatch(step=step, index=index, partition="train", rows=tuple(part))
        trainer.train_microbatch(request, batch_of(rows, [row.key for row in part]))


def train_step(
    trainer: Trainer, step: int, rows: Rows, announced: Sequence[Sequence[TrainRow]] | None = None
) -> StepMetrics:
    trainer.begin_step(begin(step, rows))
    add_microbatches(trainer, step, rows, [train_rows(rows, seed=step)] if announced is None else announced)
    return trainer.finish_step(step)


def gradients(trainer: Trainer) -> torch.Tensor:
    """All master gradients, as one vector."""
    return torch.cat([grad.flatten() for grad in trainer.policy.gradients()]).clone()


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of the master weights."""
    return {name: master.detach().clone() for name, master in trainer.policy.masters.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
