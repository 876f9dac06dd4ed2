"""The rules of evaluations and controls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller.config.checks import Findings, check_config
from controller.config.load import load_config
from controller.config.plan import plan
from tests.controller.config.files import valid, write_config

ON = ("evaluation.questions=48", "environment.args.held_out_share=0.1")


def findings(tmp_path: Path, *overrides: str) -> Findings:
    path = write_config(tmp_path, json.dumps(valid(tmp_path)))
    return check_config(load_config(path, list(overrides)))


def test_a_built_in_environment_has_to_set_prompts_aside(tmp_path: Path) -> None:
    (problem,) = findings(tmp_path, ON[0]).problems
    assert (problem.path, problem.remedy) == ("evaluation.questions", "set environment.args.held_out_share")
    assert "reverse_text sets no prompts aside" in problem.what
    assert not findings(tmp_path, *ON).problems
    (problem,) = findings(tmp_path, ON[0], "environment.args.held_out_share=1.5").problems
    assert problem.path == "environment.args"
    assert "held_out_share: a number >= 0 and < 1; got 1.5" in problem.what


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (("evaluation.every_steps=3",), "evaluation.every_steps"),
        ((*ON, "evaluation.temperature=0", "evaluation.samples=4"), "evaluation.samples"),
        (("advantage.rewards=random",), "advantage.rewards"),
    ],
)
def test_what_may_be_meant_is_only_warned_of(tmp_path: Path, overrides: tuple[str, ...], path: str) -> None:
    found = findings(tmp_path, *overrides)
    assert not found.problems
    assert [warning.path for warning in found.warnings] == [path]


def test_the_plan_says_when_is_evaluated(tmp_path: Path) -> None:
    path = write_config(tmp_path, json.dumps(valid(tmp_path)))
    config = load_config(path, [*ON, "evaluation.samples=4", "evaluation.every_steps=5"])
    model = check_config(config).model
    assert model is not None
    text = plan(config, model)
    assert "48 held-out questions x 4 samples before the first step, every 5 steps and after the last" in text
    config = load_config(path, list(ON))
    assert "48 held-out questions x 1 sample before the first step and after the last" in plan(config, model)
