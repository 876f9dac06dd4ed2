"""Whole runs of rollouts that have several conversations, through real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import conserved, finished
from tests.models import tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ENVIRONMENT = '''
from controller import RolloutResult
from workers.environments.reverse_text import ReverseText

class Team(ReverseText):
    """Two turns, a helper beside them, and a new beginning after a summary."""
    async def rollout(self, ctx, prompt):
        ask = [{"role": "user", "content": str(prompt.data)[:20]}]
        first = await ctx.chat(ask)
        second = await ctx.chat([*ask, first.message, {"role": "user", "content": "again <|end|> and again"}])
        helper = await ctx.chat([{"role": "system", "content": "help"}, {"role": "user", "content": "summarise"}])
        last = await ctx.chat([{"role": "user", "content": "so far: " + helper.text[:10]}])
        return RolloutResult(reward=float(len(last.text) % 3), scored=last.text)
'''


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "teams.py").write_text(ENVIRONMENT)
    return {
        "run": {"dir": "run", "steps": 2},
        "model": {"path": str(tiny_model(tmp_path / "model"))},
        "environment": {"name": "teams:Team"},
        "rollout": {"groups_per_step": 2, "group_size": 4, "max_tokens": 8},
    }


async def test_every_conversation_of_a_rollout_is_trained(tmp_path: Path, config: dict[str, Any]):
    config |= {"token_capture": {"trajectory": "branches", "credit": "per_token"}}
    run = await finished(config, tmp_path)
    summary = run.summary()
    assert conserved(summary)
    assert (summary["trained"], summary["unproven"]) == (16, 0)
    for step in run.metrics():
        # Three conversations each; helpers that said the same in all rollouts are still one row per rollout.
        assert (step["rollouts"], step["rows"]) == (8, 24)
    assert run.metrics()[0]["agreement"]["difference_max"] < 1e-4, "rows are scored as they were sampled"
    assert sum(step["custody"].get("verified", 0) for step in run.metrics()) >= 16
    assert "swept" not in run.output


async def test_the_scored_answer_picks_the_conversation(tmp_path: Path, config: dict[str, Any]):
    run = await finished(config, tmp_path)
    summary = run.summary()
    assert conserved(summary)
    assert summary["drop_reasons"].keys() <= {"ambiguous_terminal"}, "two answers of equal text say nothing"
    assert {step["rows"] for step in run.metrics()} <= set(range(1, 9))


@pytest.mark.campaign
async def test_a_run_can_end_at_the_first_rollout_that_cannot_be_proven(tmp_path: Path, config: dict[str, Any]):
    teams = tmp_path / "teams.py"
    teams.write_text(teams.read_text().replace(", scored=last.text", ""))
    config |= {"token_capture": {"on_failure": "abort"}}
    run = await finished(config, tmp_path, code=1)
    assert "cannot be trained: ambiguous_terminal" in run.output
    assert conserved(run.summary())
