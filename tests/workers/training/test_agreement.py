"""The agreement of trainer and sampler, against the same numbers worked out one token at a time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.training.make import CPU, VOCAB, batch_of, make_trainer, random_rows, train_step
from workers.training.agreement import MAX_AGE, AgreementMeter
from workers.training.api import RATIO_QUANTILES, Agreement
from workers.training.errors import BadTrainRow
from workers.training.losses import MAX_LOG_RATIO
from workers.training.rows import collate


def measured(differences: list[float], ages: list[int], parts: int = 1) -> tuple[Agreement, dict[int, Agreement]]:
    meter = AgreementMeter()
    d, a = torch.tensor(differences, dtype=torch.float64), torch.tensor(ages)
    for part in range(parts):
        rollout = torch.full_like(d[part::parts], -3.0)
        meter.add(rollout + d[part::parts], rollout, a[part::parts])
    return meter.measure()


def test_it_measures_mean_maximum_k3_and_quantiles_of_the_ratio():
    rng = np.random.default_rng(0)
    differences = rng.normal(0, 0.3, 101)
    whole, by_age = measured(differences.tolist(), [0] * 101, parts=3)
    assert whole == by_age[0]
    assert whole.tokens == 101
    assert whole.difference_mean == pytest.approx(sum(abs(d) for d in differences) / 101)
    assert whole.difference_max == pytest.approx(max(abs(differences)))
    assert whole.kl == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / 101)
    in_order = sorted(differences)
    assert whole.ratio_quantiles == pytest.approx([math.exp(in_order[round(100 * q)]) for q in RATIO_QUANTILES])


def test_tokens_are_told_apart_by_the_age_of_their_weights_up_to_a_limit():
    whole, by_age = measured([0.1, -0.1, 0.5, 1.0, -3.0], [0, 0, 1, MAX_AGE, MAX_AGE + 4])
    assert {age: a.tokens for age, a in by_age.items()} == {0: 2, 1: 1, MAX_AGE: 2}
    assert [by_age[age].difference_mean for age in (0, 1, MAX_AGE)] == pytest.approx([0.1, 0.5, 2.0])
    assert whole.difference_mean == pytest.approx(4.7 / 5)


def test_one_wild_token_does_not_make_the_numbers_infinite():
    whole, _ = measured([1e4, -1e4, 0.0], [0, 0, 0])
    assert whole.difference_max == pytest.approx(1e4)
    assert whole.kl <= math.exp(MAX_LOG_RATIO)
    assert all(map(math.isfinite, (whole.kl, *whole.ratio_quantiles)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models import tiny_model

    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_the_trainer_agrees_with_its_own_logprobs_at_age_0_and_sees_its_steps_at_age_1(model: Path):
    trainer = make_trainer(model)
    rows: Any = random_rows(6)
    batch = batch_of(rows)
    own = trainer._forward("policy", batch).numpy()
    place = 0
    for row in rows.values():
        count = int(row["loss_mask"].sum())
        row["rollout_logprobs"][row["loss_mask"] == 1] = own[place : place + count]
        place += count
    first, second = train_step(trainer, 0, rows), train_step(trainer, 1, rows)
    assert list(first.agreement_by_age) == [0]
    assert first.agreement.difference_max < 1e-6
    assert list(second.agreement_by_age) == [1]
    assert second.agreement.difference_mean > 1e-3


def test_a_token_of_weights_that_the_trainer_has_not_made_yet_is_refused():
    rows = random_rows(2)
    rows["row-1"]["weight_versions"][-1] = 5
    keys = list(rows)
    collate(keys, [rows[k] for k in keys], vocab_size=VOCAB, device=CPU, version=5)
    with pytest.raises(
        BadTrainRow, match="'row-1': a token was sampled with weights 5, which are newer than the policy's"
    ):
        collate(keys, [rows[k] for k in keys], vocab_size=VOCAB, device=CPU, version=4)
