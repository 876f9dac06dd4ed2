"""The gradient of a step against a naive whole-batch reference, for every combination of the loss's terms and any split."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.models import tiny_model
from tests.workers.training.make import (
    CPU,
    Rows,
    add_microbatches,
    batch_of,
    begin,
    gradients,
    make_trainer,
    random_rows,
    same,
    train_rows,
    weights,
)
from workers.training.api import LossSpec, TrainRow
from workers.training.model import load_model

TEMPERATURE, MAX_TOKENS = 0.8, 20
OLD: list[dict[str, Any]] = [
    {"old_logprobs": "rollout"},
    {"old_logprobs": "policy"},
    {"old_logprobs": "policy", "tis_cap": 1.5},
]
KL: list[dict[str, Any]] = [{}, *({"kl_coef": 0.1, "kl_estimator": k} for k in ("k1", "k2", "k3"))]
SPECS = [
    LossSpec(aggregation=aggregation, entropy_coef=entropy, **old, **kl)
    for aggregation, old, kl, entropy in product(("token_mean", "sequence_mean", "sequence_sum"), OLD, KL, (0.0, 0.02))
]


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference that differs from the policy; in a run it does so from the second step on."""
    folder = tmp_path_factory.mktemp("reference")
    return tiny_model(folder, seed=1, hidden_size=32, head_dim=8, intermediate_size=48)


def naive(spec: LossSpec, rows: Rows, announced: Sequence[TrainRow], policy: Any, reference: Any) -> dict[str, float]:
    """The loss as it stands in the papers, row by row in plain torch; leaves its gradient in `policy`."""
    row_losses, counts, everything = [], [], {"entropy": [], "clip": [], "ratio": [], "k3": [], "diff": [], "kl": []}
    for announcement in announced:
        row, advantage = rows[announcement.key], announcement.advantage
        ids = torch.from_numpy(row["input_ids"])[None]
        mask = torch.from_numpy(row["loss_mask"]).bool()[1:]
        rollout = torch.from_numpy(row["rollout_logprobs"]).double()[1:][mask]

        def every(model: Any, ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> torch.Tensor:
            return (model(input_ids=ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1)[mask]

        full, targets = every(policy), ids[0, 1:][mask][:, None]
        logp, logq = full.gather(1, targets)[:, 0], every(reference).detach().gather(1, targets)[:, 0]
        old = rollout if spec.old_logprobs == "rollout" else logp.detach()
        ratio = torch.exp(logp - old)
        surrogate = -torch.min(ratio * advantage, ratio.clip(1 - spec.clip_low, 1 + spec.clip_high) * advantage)
        if spec.tis_cap is not None:
            surrogate = surrogate * torch.exp(logp.detach() - rollout).clip(max=spec.tis_cap)
        d = logq - logp
        kl = {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - 1 - d}[spec.kl_estimator]
        entropy = -(full.exp() * full).sum(-1)
        row_losses.append(announcement.weight * (surrogate + spec.kl_coef * kl))
        counts.append(int(mask.sum()))
        outside = (ratio > 1 + spec.clip_high) & (advantage > 0) | (ratio < 1 - spec.clip_low) & (advantage < 0)
        log_sampler_ratio = logp - rollout
        everything["entropy"].append(entropy)
        everything["clip"].append(outside.double())
        everything["ratio"].append(ratio)
        everything["k3"].append(torch.exp(log_sampler_ratio) - 1 - log_sampler_ratio)
        everything["diff"].append(log_sampler_ratio.abs())
        everything["kl"].append(kl)
    if spec.aggregation == "token_mean":
        loss = torch.cat(row_losses).mean()
    elif spec.aggregation == "sequence_mean":
        loss = torch.stack([x.mean() for x in row_losses]).mean()
    else:
        loss = torch.stack([x.sum() for x in row_losses]).sum() / (len(row_losses) * MAX_TOKENS)
    flat = {name: torch.cat(values) for name, values in everything.items()}
    loss = loss - spec.entropy_coef * flat["entropy"].mean()
    loss.backward()
    means = {name: values.mean().item() for name, values in flat.items()}
    return means | {"loss": loss.item(), "diff": flat["diff"].max().item(), "tokens": sum(counts)}


def random_split(rows: Sequence[TrainRow], seed: int) -> list[list[TrainRow]]:
    rng = np.random.default_rng(seed)
    parts = rng.integers(0, 4, len(rows))
    shuffled = [rows[i] for i in rng.permutation(len(rows))]
    split = [[row for row, part in zip(shuffled, parts, strict=True) if part == p] for p in range(4)]
    return [part for part in split if part]


@pytest.mark.parametrize("number", range(len(SPECS)))
def test_gradient_and_metrics_equal_the_naive_reference(number: int, model: Path, other_model: Path):
    spec, rows = SPECS[number], random_rows(9, seed=number)
    announced = train_rows(rows, seed=number)
    reference: Any = load_model(str(other_model), torch.float64, CPU)
    trainer = make_trainer(
        model, loss=spec, temperature=TEMPERATURE, max_tokens=MAX_TOKENS, reference=reference if spec.kl_coef else None
    )
    if number % 2:
        for kept in ("policy", "reference") if spec.kl_coef else ("policy",):
            trainer.logprobs(0, kept, batch_of(rows))
    trainer.begin_step(begin(0, rows))
    add_microbatches(trainer, 0, rows, random_split(announced, seed=number))
    ours = gradients(trainer)

    plain: Any = load_model(str(model), torch.float64, CPU)
    expected = naive(spec, rows, announced, plain, reference)
    theirs = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert (ours - theirs).norm() <= 1e-10 * theirs.norm()

    metrics = trainer.finish_step(0)
    assert metrics.loss == pytest.approx(expected["loss"], rel=1e-10)
    assert metrics.grad_norm == pytest.approx(theirs.norm().item(), rel=1e-10)
    assert metrics.entropy == pytest.approx(expected["entropy"], rel=1e-10)
    assert metrics.clip_fraction == pytest.approx(expected["clip"], rel=1e-10)
    assert metrics.ratio_mean == pytest.approx(expected["ratio"], rel=1e-10)
    assert metrics.agreement.kl == pytest.approx(expected["k3"], rel=1e-10)
    assert metrics.agreement.difference_max == pytest.approx(expected["diff"], rel=1e-10)
    assert metrics.kl_reference == (pytest.approx(expected["kl"], rel=1e-10) if spec.kl_coef else None)
    assert metrics.tokens == expected["tokens"]


def test_rollout_logprobs_exercise_clipping(model: Path):
    rows = random_rows(9)
    trainer = make_trainer(model)
    trainer.begin_step(begin(0, rows))
    add_microbatches(trainer, 0, rows, [train_rows(rows)])
    assert 0.1 < trainer.finish_step(0).clip_fraction < 0.9


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    number=st.integers(0, len(SPECS) - 1),
    parts=st.lists(st.integers(0, 5), min_size=7, max_size=7),
    order=st.permutations(range(7)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_split_into_microbatches_gives_the_update_of_one_batch(
    number: int, parts: list[int], order: list[int], dtype: torch.dtype, model: Path
):
    rows = random_rows(7, seed=number)
    announced = train_rows(rows, seed=number)
    grads, updates = [], []
    for split in ([announced], [[announced[i] for i in order if parts[i] == p] for p in sorted(set(parts))]):
        trainer = make_trainer(model, dtype=dtype, loss=SPECS[number], max_tokens=MAX_TOKENS)
        start = weights(trainer)
        trainer.begin_step(begin(0, rows))
        add_microbatches(trainer, 0, rows, split)
        grads.append(gradients(trainer).double())
        trainer.finish_step(0)
        end = weights(trainer)
        assert not same(start, end)
        updates.append(torch.cat([(end[name] - start[name]).flatten() for name in start]).double())
    # In float32 a product's rounding depends on the batch's shape.
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert (grads[1] - grads[0]).norm() <= tolerance * grads[0].norm()
    if dtype == torch.float64:
        # Adam's first update is nearly the gradient's sign, which magnifies what rounds around zero.
        assert (updates[1] - updates[0]).norm() <= 1e-6 * updates[0].norm()
