"""Token echo: an environment's own tokens are checked, trained, and marked as unproven wherever they are counted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controller.echo import EchoedRow, Limits, echoed_row, size
from dataplane.schema import STAGING, TRAIN
from ledger.errors import LedgerError
from ledger.events import MemoryLog, RolloutOpened
from ledger.reasons import Reason, Rejection
from tests.custody.rig import House, user
from tests.custody.tokenizers import saved
from tests.e2e.running import conserved, finished
from tests.models import tiny_model
from workers.environments.base import Tokens
from workers.generation.rendering import ChatRenderer
from workers.training.rows import DTYPES

LIMITS = Limits(vocab_size=100, max_tokens=50, version=3)
GOOD = Tokens(input_ids=[1, 2, 99], loss_mask=[0, 1, 1], logprobs=[0.0, -0.5, -2], weight_versions=[3, 2, 3])


def test_good_tokens_make_a_row_as_the_trainer_wants_it():
    row = echoed_row(GOOD, LIMITS)
    assert isinstance(row, EchoedRow)
    assert {name: column.dtype for name, column in row.columns.items()} == dict(DTYPES)
    assert {name: column.tolist() for name, column in row.columns.items()} == {
        "input_ids": [1, 2, 99],
        "loss_mask": [0, 1, 1],
        "rollout_logprobs": [0.0, -0.5, -2.0],
        "weight_versions": [3, 2, 3],
    }
    assert (row.length, row.loss_tokens, row.oldest_version) == (3, 2, 2)


def test_arrays_do_as_well_and_what_stands_at_prompt_tokens_does_not_matter():
    row = echoed_row(
        Tokens(
            input_ids=np.array([1, 2], np.int32),  # type: ignore[arg-type]
            loss_mask=np.array([False, True]),  # type: ignore[arg-type]
            logprobs=np.array([math.nan, -1]),  # type: ignore[arg-type]
            weight_versions=np.array([0, 0]),  # type: ignore[arg-type]
        ),
        LIMITS,
    )
    assert isinstance(row, EchoedRow)
    assert row.columns["rollout_logprobs"].tolist() == [0.0, -1.0]


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": [1, 2]}, "differ in length"),
    ({"input_ids": [], "loss_mask": [], "logprobs": [], "weight_versions": []}, "flat lists"),
    ({"input_ids": [1], "loss_mask": [1], "logprobs": [-1.0], "weight_versions": [0]}, "1 tokens; a row has 2 to 50"),
    ({"input_ids": [1, 2, 100]}, "go from 1 to 100; the model has 0 to 99"),
    ({"input_ids": [1, -2, 3]}, "go from -2 to 3"),
    ({"input_ids": [1, 2**63, 3]}, "flat lists"),
    ({"input_ids": [1, 2**70, 3]}, "flat lists"),
    ({"input_ids": [1.0, 2.0, 3.0]}, "flat lists"),
    ({"input_ids": [[1], [2], [3]]}, "flat lists"),
    ({"input_ids": [[1], 2, 3]}, "flat lists"),
    ({"input_ids": "abc"}, "flat lists"),
    ({"input_ids": None}, "flat lists"),
    ({"loss_mask": [0, 0, 0]}, "loss_mask"),
    ({"loss_mask": [1, 0, 0]}, "loss_mask"),
    ({"loss_mask": [0, 1, 2]}, "loss_mask"),
    ({"logprobs": [0, -1, math.nan]}, "logprob"),
    ({"logprobs": [0, -1, -math.inf]}, "logprob"),
    ({"logprobs": [0, -1, -1e39]}, "logprob"),
    ({"logprobs": [0, -1, 0.5]}, "logprob"),
    ({"logprobs": ["a", "b", "c"]}, "flat lists"),
    ({"weight_versions": [0, 0, 4]}, "weight versions go from 0 to 4; there are 0 to 3"),
    ({"weight_versions": [0, -1, 0]}, "weight versions go from -1"),
]


@pytest.mark.parametrize(("change", "message"), IMPOSSIBLE)
def test_what_is_impossible_is_rejected(change: dict[str, Any], message: str):
    rejection = echoed_row(replace(GOOD, **change), LIMITS)
    assert isinstance(rejection, Rejection)
    assert rejection.reason is Reason.BAD_TOKENS
    assert message in rejection.detail
    nothing = echoed_row(None, LIMITS)
    assert isinstance(nothing, Rejection)
    assert nothing.reason is Reason.NO_TOKENS


LISTS = st.lists(st.integers(-2, 120) | st.floats(), max_size=4)
ANY = st.none() | st.integers() | st.floats() | st.text(max_size=3) | LISTS


@given(*[ANY] * 4)
def test_anything_is_a_row_that_the_trainer_takes_or_a_rejection(ids, mask, logprobs, versions):
    tokens = Tokens(input_ids=ids, loss_mask=mask, logprobs=logprobs, weight_versions=versions)
    size(tokens)
    row = echoed_row(tokens, LIMITS)
    if isinstance(row, EchoedRow):
        assert {column.size for column in row.columns.values()} == {row.length}
        assert np.isfinite(row.columns["rollout_logprobs"]).all()
        assert row.columns["loss_mask"][0] == 0 < row.loss_tokens


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(saved(tmp_path_factory.mktemp("tokenizer"), "newlines"))


def echoing(renderer: ChatRenderer, **options: Any) -> House:
    return House(Path(), renderer=renderer, trajectory="echo", echo_limits=lambda: LIMITS, **options)


async def nothing(rollout_id: str) -> None:
    pass


@pytest.mark.anyio
async def test_echoed_rollouts_are_trained_and_marked(renderer: ChatRenderer):
    house = echoing(renderer)
    bad = replace(GOOD, input_ids=[1, 2, 500])
    await house.play("g", *[nothing] * 4, tokens=[GOOD, None, bad, GOOD])
    await house.finalize()
    samples = house.samples()
    assert {r: s.reason for r, s in samples.items()} == {
        "g.0": None,
        "g.1": Reason.NO_TOKENS,
        "g.2": Reason.BAD_TOKENS,
        "g.3": None,
    }
    assert [s.proven for s in samples.values() if s.valid] == [False, False]
    counts = house.finalizers.take_counts()
    assert counts == counts | {"unproven": 2, "rejected": 2, "rejected_bad_tokens": 1, "rows_published": 2}
    assert "verified" not in counts
    await house.train()
    assert sorted(row.key for row in house.trainer.rows) == ["g.0", "g.3"]
    for partition in (STAGING, TRAIN):
        assert await house.plane.keys(partition) == []
    account = house.ledger.account
    assert (account.trained, account.dropped, account.lost, account.duplicated) == (2, 2, 0, 0)
    assert isinstance(house.log, MemoryLog)
    assert {e.trajectory for e in house.log.events if isinstance(e, RolloutOpened)} == {"echo"}


@pytest.mark.anyio
async def test_a_rollout_that_timed_out_is_not_trained_on_what_it_returned(renderer: ChatRenderer):
    house = echoing(renderer)
    await house.play("g", nothing, nothing, tokens=[GOOD, GOOD], failures=[None, Reason.ROLLOUT_TIMEOUT])
    await house.finalize()
    assert [s.reason for s in house.samples().values()] == [None, Reason.ROLLOUT_TIMEOUT]


@pytest.mark.anyio
async def test_without_capture_the_gate_answers_nothing(renderer: ChatRenderer):
    house = echoing(renderer)
    await house.dispatch("g", 1)
    with pytest.raises(LedgerError, match="played without token capture"):
        await house.chat("g.0", user("hi"))
    assert await house.staged() == []
    assert house.engine.prompts == {}


@pytest.mark.anyio
async def test_a_rollout_of_a_run_with_capture_cannot_be_trained_on_echoed_tokens(renderer: ChatRenderer):
    house = House(Path(), renderer=renderer)
    await house.play("g", nothing, tokens=[GOOD])
    await house.finalize()
    assert house.finalizers.rejections == {Reason.NO_CALLS: 1}


ENVIRONMENT = '''
import numpy as np
from controller import Prompt, RolloutResult
from workers.environments.base import Tokens

class Echo:
    """Knows a sampler of its own: here one that says anything."""
    def prompts(self, seed):
        yield from (Prompt(id=str(i), data=i) for i in range(10_000))

    async def rollout(self, ctx, prompt):
        n = 4 + prompt.data % 3
        rng = np.random.default_rng(prompt.data)
        return RolloutResult(reward=float(rng.random()), tokens=None if ctx.rollout_id.endswith(".3") else Tokens(
            input_ids=rng.integers(7, 100, n).tolist(), loss_mask=[0] + [1] * (n - 1),
            logprobs=(-4.6 - 0.1 * rng.random(n)).tolist(), weight_versions=[0] * n))

class Chats(Echo):
    async def rollout(self, ctx, prompt):
        await ctx.chat([{"role": "user", "content": "hi"}])
'''


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_run_without_capture_trains_and_says_that_nothing_is_proven(tmp_path: Path):
    (tmp_path / "echoes.py").write_text(ENVIRONMENT)
    config = {
        "run": {"dir": "run", "steps": 2},
        "model": {"path": str(tiny_model(tmp_path / "model"))},
        "environment": {"name": "echoes:Echo"},
        "rollout": {"groups_per_step": 2, "group_size": 4, "max_staleness": 3},
        "token_capture": {"enabled": False},
    }
    run = await finished(config, tmp_path)
    summary = run.summary()
    assert conserved(summary)
    assert (summary["trained"], summary["unproven"], summary["dropped"]) == (12, 12, 4)
    assert summary["drop_reasons"]["no_tokens"] >= 4
    assert [step["unproven"] for step in run.metrics()] == [6, 6]
    assert "UNPROVEN" in run.output
    assert (run.run_dir / "report.png").stat().st_size > 0


@pytest.mark.campaign
@pytest.mark.anyio
async def test_an_environment_that_chats_without_capture_is_told_so(tmp_path: Path):
    (tmp_path / "echoes.py").write_text(ENVIRONMENT)
    config = {
        "run": {"dir": "run", "steps": 1},
        "model": {"path": str(tiny_model(tmp_path / "model"))},
        "environment": {"name": "echoes:Chats"},
        "token_capture": {"enabled": False},
    }
    run = await finished(config, tmp_path, code=1)
    assert "played without token capture" in run.output
