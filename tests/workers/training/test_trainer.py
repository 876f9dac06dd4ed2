"""One optimizer step: warm-up, clipping, AdamW, metrics, kept logprobs, and refusals before any weight moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from tests.workers.training.make import (
    add_microbatches,
    batch_of,
    begin,
    gradients,
    make_trainer,
    random_rows,
    same,
    train_rows,
    train_step,
    weights,
)
from workers.training.api import BeginStep, LossSpec, Microbatch, OptimizerSpec
from workers.training.errors import NonFinite, OutOfOrder
from workers.training.step import Phase


def test_warm_up_is_linear_and_then_constant(model: Path):
    trainer = make_trainer(model, optimizer=OptimizerSpec(lr=1e-3, warmup_steps=4))
    rates = [train_step(trainer, step, random_rows(3, seed=step)).lr for step in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_updates_are_those_of_adamw_on_the_clipped_gradient(model: Path, max_norm: float):
    spec = OptimizerSpec(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, warmup_steps=2, max_grad_norm=max_norm)
    trainer = make_trainer(model, optimizer=spec)
    plain = {name: value.clone().requires_grad_() for name, value in weights(trainer).items()}
    adamw = torch.optim.AdamW(plain.values(), lr=0.0, betas=spec.betas, eps=spec.eps, weight_decay=0.1)
    for step in range(3):
        rows = random_rows(4, seed=step)
        trainer.begin_step(begin(step, rows))
        add_microbatches(trainer, step, rows, [train_rows(rows, seed=step)])
        norm = gradients(trainer).norm().item()
        for name, master in trainer.policy.masters.items():
            assert master.grad is not None
            plain[name].grad = master.grad * min(1.0, max_norm / (norm + 1e-6))
        for group in adamw.param_groups:
            group["lr"] = 1e-2 * (0.5, 1.0, 1.0)[step]
        adamw.step()
        metrics = trainer.finish_step(step)
        assert metrics.grad_norm == pytest.approx(norm)
        for name, master in trainer.policy.masters.items():
            assert torch.allclose(master, plain[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rate_of_zero_leaves_every_bit_of_the_weights(model: Path, dtype: torch.dtype):
    trainer = make_trainer(model, dtype=dtype, optimizer=OptimizerSpec(lr=0.0, weight_decay=0.1))
    before = weights(trainer)
    for step in range(2):
        assert train_step(trainer, step, random_rows(4, seed=step)).grad_norm > 0
    assert same(weights(trainer), before)


def test_two_trainers_do_the_same_bit_for_bit(model: Path):
    ends = []
    for _ in range(2):
        trainer = make_trainer(model, dtype=torch.float32, loss=LossSpec(kl_coef=0.1, entropy_coef=0.01))
        for step in range(3):
            train_step(trainer, step, random_rows(4, seed=step))
        ends.append(weights(trainer))
    assert same(*ends)


def test_a_step_with_signal_raises_the_probability_of_good_tokens(model: Path):
    """Ten steps on the same rows: those with a positive advantage become likelier, the others less likely."""
    trainer = make_trainer(model, optimizer=OptimizerSpec(lr=3e-3), loss=LossSpec(old_logprobs="policy"))
    rows = random_rows(6)
    announced = [msgspec.structs.replace(row, advantage=(-1.0) ** i) for i, row in enumerate(train_rows(rows))]

    def logprob_sums() -> list[float]:
        trainer.logprobs(trainer.state.step, "policy", batch_of(rows))
        return [trainer._kept[("policy", key)].sum().item() for key in rows]

    before = logprob_sums()
    for step in range(10):
        train_step(trainer, step, rows, [announced])
    after = logprob_sums()
    assert all((b - a) * row.advantage > 0 for a, b, row in zip(before, after, announced, strict=True))


def test_kept_logprobs_and_those_computed_on_the_spot_are_equal(model: Path):
    spec, rows = LossSpec(old_logprobs="policy", tis_cap=2.0, kl_coef=0.2), random_rows(6)
    losses = []
    for keep in (False, True):
        trainer = make_trainer(model, loss=spec)
        train_step(trainer, 0, random_rows(3, seed=5))
        if keep:
            trainer.logprobs(1, "policy", batch_of(rows))
            trainer.logprobs(1, "reference", batch_of(rows))
        losses.append(train_step(trainer, 1, rows))
    assert losses[0].loss == pytest.approx(losses[1].loss, rel=1e-12)
    assert losses[0].kl_reference == pytest.approx(losses[1].kl_reference, rel=1e-9)
    assert (losses[0].kl_reference or 0) > 0


def test_the_reference_stays_at_the_first_weights(model: Path):
    trainer = make_trainer(model, loss=LossSpec(kl_coef=0.5), optimizer=OptimizerSpec(lr=1e-2))
    kls = [train_step(trainer, step, random_rows(5, seed=step)).kl_reference or 0.0 for step in range(3)]
    assert kls[0] == pytest.approx(0.0, abs=1e-12)
    assert kls[1] > 1e-6
    assert kls[2] > 1e-6


def test_kept_logprobs_do_not_outlive_their_step(model: Path):
    trainer = make_trainer(model, loss=LossSpec(old_logprobs="policy"))
    rows = random_rows(3)
    trainer.logprobs(0, "policy", batch_of(rows))
    train_step(trainer, 0, rows)
    assert not trainer._kept


def test_logprobs_of_another_step_or_a_missing_reference_are_refused(model: Path):
    trainer = make_trainer(model)
    with pytest.raises(OutOfOrder, match="step 1 is out of order, step 0 is next"):
        trainer.logprobs(1, "policy", batch_of(random_rows(2)))
    with pytest.raises(OutOfOrder, match="no reference model"):
        trainer.logprobs(0, "reference", batch_of(random_rows(2)))


def test_rows_without_loss_tokens_count_as_sequences_only(model: Path):
    rows = random_rows(4)
    silent = random_rows(1, seed=9)["row-0"]
    silent["loss_mask"][:] = 0
    rows["silent"] = silent
    announced = train_rows(rows)
    trainer = make_trainer(model, loss=LossSpec(aggregation="sequence_mean"))
    metrics = train_step(trainer, 0, rows, [announced[:4], announced[4:]])
    rows.pop("silent")
    four = train_step(make_trainer(model, loss=LossSpec(aggregation="sequence_mean")), 0, rows, [announced[:4]])
    assert metrics.loss == pytest.approx(four.loss * 4 / 5)
    assert metrics.tokens == four.tokens


def test_a_loss_that_is_not_finite_names_step_and_rows_and_moves_nothing(model: Path):
    trainer = make_trainer(model)
    before, rows = weights(trainer), random_rows(4)
    announced = train_rows(rows)
    announced[2] = msgspec.structs.replace(announced[2], advantage=float("nan"))
    trainer.begin_step(begin(0, rows))
    with pytest.raises(NonFinite, match=r"step 0, microbatch 0: the loss is nan; rows \['row-2'\]"):
        add_microbatches(trainer, 0, rows, [announced])
    with pytest.raises(OutOfOrder, match=r"step 0 is broken \(NonFinite"):
        trainer.finish_step(0)
    assert same(weights(trainer), before)


def test_a_gradient_that_is_not_finite_breaks_the_step_before_the_optimizer_moves(model: Path):
    trainer = make_trainer(model, dtype=torch.float32)
    before, rows = weights(trainer), random_rows(4)
    # Each square in the norm is finite in itself; only the gradient overflows.
    announced = [msgspec.structs.replace(row, advantage=1e37) for row in train_rows(rows)]
    trainer.begin_step(begin(0, rows))
    with pytest.raises(NonFinite, match="step 0, microbatch 0: the gradient's norm is"):
        add_microbatches(trainer, 0, rows, [announced])
    assert trainer.state.phase is Phase.BROKEN
    assert same(weights(trainer), before)


def test_a_restarted_step_forgets_what_the_broken_one_added_up(model: Path):
    rows, good = random_rows(4), random_rows(5, seed=3)
    poison = [msgspec.structs.replace(row, advantage=float("inf")) for row in train_rows(rows)]
    trainer = make_trainer(model, dtype=torch.float32)
    trainer.begin_step(begin(0, rows))
    add_microbatches(trainer, 0, rows, [train_rows(rows)[:2]])
    second = Microbatch(step=0, index=1, partition="train", rows=tuple(poison[2:]))
    with pytest.raises(NonFinite):
        trainer.train_microbatch(second, batch_of(rows, ["row-2", "row-3"]))
    with pytest.raises(OutOfOrder, match="restart=True"):
        trainer.begin_step(begin(0, good))
    trainer.begin_step(begin(0, good, restart=True))
    add_microbatches(trainer, 0, good, [train_rows(good)])
    after_restart = trainer.finish_step(0)

    fresh = make_trainer(model, dtype=torch.float32)
    without = train_step(fresh, 0, good, [train_rows(good)])
    assert replace_seconds(after_restart) == replace_seconds(without)
    assert same(weights(trainer), weights(fresh))


def replace_seconds(metrics: msgspec.Struct) -> msgspec.Struct:
    return msgspec.structs.replace(metrics, seconds=0.0)


def test_a_failure_inside_the_forward_pass_breaks_the_step(model: Path):
    rows = random_rows(2)
    trainer = make_trainer(model)
    trainer.begin_step(begin(0, rows))
    broken = replace(batch_of(rows), input_ids=batch_of(rows).input_ids + 1000)
    with pytest.raises(IndexError):
        trainer.train_microbatch(Microbatch(step=0, index=0, partition="t", rows=tuple(train_rows(rows))), broken)
    assert trainer.state.phase is Phase.BROKEN


def test_a_failure_while_weights_move_loses_them(model: Path, monkeypatch: pytest.MonkeyPatch):
    rows = random_rows(2)
    trainer = make_trainer(model)
    trainer.begin_step(begin(0, rows))
    add_microbatches(trainer, 0, rows, [train_rows(rows)])

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("no room for Adam's moments")

    monkeypatch.setattr(trainer.optimizer, "step", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.finish_step(0)
    for call in (
        lambda: trainer.finish_step(0),
        lambda: trainer.begin_step(begin(0, rows, restart=True)),
        lambda: trainer.logprobs(0, "policy", batch_of(rows)),
    ):
        with pytest.raises(OutOfOrder, match=r"the weights are lost .*only load helps"):
            call()


def test_settings_that_contradict_each_other_are_refused(model: Path):
    with pytest.raises(ValueError, match="temperature is 0"):
        make_trainer(model, temperature=0.0)
    with pytest.raises(ValueError, match="tis_cap needs"):
        make_trainer(model, loss=LossSpec(tis_cap=2.0))


def test_info_counts_tied_parameters_once(model: Path):
    trainer = make_trainer(model)
    assert trainer.info().parameters == sum(p.numel() for p in trainer.policy.model.parameters())
    assert trainer.info().step == 0
    train_step(trainer, 0, random_rows(2))
    assert trainer.info().step == 1


def test_totals_of_nothing_are_refused(model: Path):
    with pytest.raises(OutOfOrder, match="0 loss tokens in 4 sequences"):
        make_trainer(model).begin_step(BeginStep(step=0, loss_tokens=0, sequences=4))
