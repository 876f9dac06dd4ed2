"""A run with evaluations, as a user has it: interrupted in the middle of one, resumed, and every evaluation made once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.running import conserved, finished, started

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def evaluations(run_dir: Path) -> list[Any]:
    return [msgspec.json.decode(line) for line in (run_dir / "evaluations.jsonl").read_bytes().splitlines()]


@pytest.mark.long
async def test_an_interrupted_run_makes_no_evaluation_twice_and_leaves_none_out(
    config: dict[str, Any], tmp_path: Path
) -> None:
    config["run"]["steps"] = 4
    config["environment"]["args"] = {"held_out_share": 0.1}
    config["evaluation"] = {"questions": 12, "samples": 4, "every_steps": 2}
    async with started(config, tmp_path) as run:
        await run.until(r"^\S+ evaluation after step 0: ")
        await run.until(r"^\S+ step 2/4 ")  # Now it evaluates again.
        run.interrupt()
        assert await run.exit_code() == 130, run.output
        await run.gone()
    assert conserved(run.summary()), run.summary()
    assert evaluations(run.run_dir)[0]["step"] == 0

    run = await finished(config, tmp_path)
    summary, found = run.summary(), evaluations(run.run_dir)
    assert conserved(summary), summary
    assert [(e["step"], e["oldest_version"], e["rejected"]) for e in found] == [(0, 0, 0), (2, 2, 0), (4, 4, 0)]
    assert (summary["evaluation_first"]["step"], summary["evaluation_last"]["step"]) == (0, 4)
    assert re.search(r"^ {2}held out +\S+ \+-\S+ -> \S+ \+-\S+ ", run.output, re.MULTILINE)
    assert [step["step"] for step in run.metrics()] == [1, 2, 3, 4]
    assert "evaluate" in run.metrics()[0]["phases"]
    lines = (run.run_dir / "evaluations.jsonl").read_bytes().splitlines(keepends=True)
    (run.run_dir / "evaluations.jsonl").write_bytes(b"".join(lines[:-1]))  # As if it had been killed in the last one.
    run = await finished(config, tmp_path)
    assert [e["step"] for e in evaluations(run.run_dir)] == [0, 2, 4]
    assert (run.summary()["status"], run.summary()["dispatched"]) == ("finished", summary["dispatched"])
    assert "is finished" in (await finished(config, tmp_path, code=2)).output
    assert run.metrics()[0]["agreement"]["age_0_difference_max"] < 1e-4
    assert run.metrics()[3]["agreement"]["age_1_difference_mean"] > 0


async def test_an_environment_that_offers_no_held_out_prompts_is_refused_before_anything_starts(
    config: dict[str, Any], tmp_path: Path
) -> None:
    run = await finished(config | {"evaluation": {"questions": 4}}, tmp_path, code=2)
    assert "reverse_text sets no prompts aside" in run.output
    assert "set environment.args.held_out_share" in run.output
