"""Rules between keys, and between keys and machine: each violation is found with its numbers, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from controller.config.checks import Findings, check_config
from controller.config.load import load_config
from controller.config.schema import Config, EnvironmentConfig, RolloutConfig
from tests.controller.config.files import valid, valid_config, write_config, write_model


def findings(tmp_path: Path, *overrides: str) -> Findings:
    path = write_config(tmp_path, json.dumps(valid(tmp_path)))
    return check_config(load_config(path, ["training.max_tokens_per_microbatch=512", *overrides]))


def test_a_sound_config_has_no_findings(tmp_path: Path) -> None:
    assert findings(tmp_path)[:2] == ((), ())
    assert check_config(valid_config(tmp_path))[:2] == ((), ())


OWN = "environment.name=workers.environments.reverse_text:ReverseText"
ERRORS = [
    (
        ["token_capture.enabled=false", "token_capture.trajectory=branches", OWN],
        "token_capture.trajectory: branches with token_capture.enabled false",
    ),
    (["token_capture.credit=per_token"], "token_capture.credit: per_token with token_capture.trajectory terminal"),
    (["token_capture.enabled=false"], "token_capture.enabled: false with environment.name reverse_text"),
    (
        ["rollout.over_sampling=1.5", "rollout.sampler=in_order"],
        "rollout.over_sampling: 1.5 with rollout.sampler in_order",
    ),
    (
        ["rollout.over_sampling=1.5", "rollout.max_staleness=0"],
        "of 24 groups a step trains 16, and the 8 others are 1 step old for the next one, 1 > 0, so each is evicted",
    ),
    (
        ["rollout.freshest_first=true"],
        "rollout.freshest_first: true with rollout.sampler windowed and rollout.over_sampling 1",
    ),
    (
        ["rollout.staleness_from=oldest_token", "rollout.sampler=ready_first"],
        "rollout.staleness_from: oldest_token with rollout.sampler ready_first",
    ),
    (["rollout.sampler_args={a: 1}"], "rollout.sampler_args: is given with rollout.sampler windowed"),
    (["rollout.sampler=no_such_module:Mine"], 'rollout.sampler: "no_such_module:Mine": there is no module'),
    (
        ["rollout.sampler=controller.samplers:ReadyFirst", "rollout.min_step_batch_fraction=0.5"],
        "rollout.min_step_batch_fraction: 0.5 with rollout.sampler controller.samplers:ReadyFirst",
    ),
    (["rollout.group_size=1"], "rollout.group_size: 1 with advantage.estimator grpo"),
    (["rollout.group_size=1", "advantage.estimator=rloo"], "rollout.group_size: 1 with advantage.estimator rloo"),
    (["rollout.temperature=0"], "rollout.temperature: 0 is greedy sampling"),
    (["rollout.top_k=1"], "rollout.top_k: 1 is greedy sampling"),
    (["rollout.call_timeout_s=601"], "rollout.call_timeout_s: 601 > 600"),
    (["loop.exit_after_s=0.1"], "loop.exit_after_s: 0.1 s <= 100 ms of loop.report_over_ms"),
    (["loop.fail_over_ms=60000"], "loop.exit_after_s: 60 s <= 60000 ms of loop.fail_over_ms"),
    (["watchdog.stall_after_s=300"], "watchdog.stall_after_s: 300 <= 300"),
    (["training.loss.tis_cap=2"], "training.loss.tis_cap: 2 with training.loss.old_logprobs rollout"),
    (["rollout.max_tokens=512"], "rollout.max_tokens: 512 >= 512"),
    (["generation.max_model_len=16"], "rollout.max_tokens: 16 >= 16"),
    (["generation.max_model_len=513"], "generation.max_model_len: 513 > 512"),
    (["environment.name=reverse_txt"], "did you mean: reverse_text"),
    (["environment.name=a/b:C"], 'environment.name: "a/b:C" is not known'),
    (["environment.name=no_such_module.x:C"], "there is no module no_such_module,"),
    (["environment.name=controller.nothing.x:C"], "there is no module controller.nothing,"),
    (["environment.name=json.decoder.x:C"], "there is no module json.decoder.x,"),
    (["environment.args.max_lenght=3"], "environment.args.max_lenght: reverse_text has no such argument"),
    (["model.path=some-org/Some-Model-1B"], "hf download some-org/Some-Model-1B --local-dir some-org/Some-Model-1B"),
    (["model.path=/dev/null"], "model.path: /dev/null is not a folder (a file)"),
    (["model.path=" + "x" * 300], "is not a folder (File name too long)"),
    (["run.dir=/dev/null"], "run.dir: /dev/null: /dev/null is not a folder (a file)"),
    (["run.dir=/dev/null/runs/a"], "run.dir: /dev/null/runs/a: /dev/null is not a folder (a file)"),
    (["weight_sync.dir=/no/such/folder"], "weight_sync.dir: /no/such/folder is not a folder that can be written to"),
]


@pytest.mark.parametrize(("overrides", "text"), ERRORS)
def test_a_violated_rule_is_one_problem_with_its_numbers(tmp_path: Path, overrides: list[str], text: str) -> None:
    found = findings(tmp_path, *overrides)
    (problem,) = found.problems
    assert text in str(problem)
    assert found.warnings == ()


WARNINGS = [
    (["token_capture.trajectory=branches", "rollout.max_calls=1"], "branches with rollout.max_calls 1"),
    (["rollout.max_in_flight_groups=33"], "rollout.max_in_flight_groups: 33 has no effect"),
    (["rollout.top_p=0.9"], "rollout.top_p: top_p 0.9, top_k 0: the sampler's logprobs are of the cut distribution"),
    (["rollout.top_k=20"], "rollout.top_k: top_p 1, top_k 20"),
    (["training.max_tokens_per_microbatch=511"], "training.max_tokens_per_microbatch: 511 < 512"),
    (["training.optimizer.lr=0"], "training.optimizer.lr: 0: the weights will not change"),
    (["training.optimizer.warmup_steps=11"], "training.optimizer.warmup_steps: 11 > run.steps 10"),
    (["watchdog.stall_after_s=600"], "watchdog.stall_after_s: 600 <= 600"),
    (["training.step_timeout_s=1000"], "allowed: > training.step_timeout_s"),
    (["generation.workers=4", "generation.threads=1000"], "4 x 1000 generation threads and 1 training threads"),
]


@pytest.mark.parametrize(("overrides", "text"), WARNINGS)
def test_a_doubtful_setting_is_one_warning(tmp_path: Path, overrides: list[str], text: str) -> None:
    found = findings(tmp_path, *overrides)
    (warning,) = found.warnings
    assert text in str(warning)
    assert found.problems == ()


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.over_sampling=1.5"],
        ["rollout.max_in_flight_groups=1"],  # fewer than a step's groups: ready ones do not count
        ["rollout.max_in_flight_groups=32"],
        ["rollout.call_timeout_s=600"],
        ["rollout.max_tokens=511"],
        ["generation.max_model_len=512"],
        ["training.loss.tis_cap=2", "training.loss.old_logprobs=policy"],
        ["rollout.top_p=0.9", "training.loss.old_logprobs=policy"],
        ["watchdog.stall_after_s=1", "watchdog.stall_action=warn"],
        [OWN],
        ["token_capture.enabled=false", OWN, "token_capture.on_failure=drop_group"],
        ["token_capture.trajectory=branches", "token_capture.credit=per_branch", "token_capture.on_failure=abort"],
        ["generation.device=cuda", "generation.threads=1000"],
        ["weight_sync.dir=/tmp"],
    ],
)
def test_what_just_holds_is_left_alone(tmp_path: Path, overrides: list[str]) -> None:
    assert findings(tmp_path, *overrides)[:2] == ((), ())


def test_all_rules_are_checked_in_one_pass(tmp_path: Path) -> None:
    found = findings(
        tmp_path, "rollout.group_size=1", "rollout.temperature=0", "model.path=nowhere", "rollout.call_timeout_s=601"
    )
    paths = ["model.path", "rollout.group_size", "rollout.temperature", "rollout.call_timeout_s"]
    assert [p.path for p in found.problems] == paths


def test_values_of_a_config_made_in_code_are_checked_too(tmp_path: Path) -> None:
    sound = valid_config(tmp_path)
    config = Config(
        run=sound.run,
        model=sound.model,
        environment=EnvironmentConfig(name="reverse_text", args={"scorer": object()}),
        rollout=RolloutConfig(group_size=0),
    )
    assert [p.path for p in check_config(config).problems] == ["environment.args"]
    config = Config(
        run=sound.run, model=sound.model, environment=sound.environment, rollout=RolloutConfig(group_size=0)
    )
    assert [p.path for p in check_config(config).problems] == ["rollout.group_size"]


def test_a_context_that_nobody_states_must_be_configured(tmp_path: Path) -> None:
    model = write_model(tmp_path / "endless", max_position_embeddings=None)
    (problem,) = findings(tmp_path, f"model.path={model}").problems
    assert problem.path == "generation.max_model_len"
    assert findings(tmp_path, f"model.path={model}", "generation.max_model_len=512").problems == ()


def test_the_script_that_makes_the_quickstarts_missing_model_is_named(tmp_path: Path) -> None:
    (problem,) = findings(tmp_path, f"model.path={tmp_path / 'models' / 'quickstart'}").problems
    assert problem.remedy is not None
    assert "prepare_quickstart.py" in problem.remedy


def test_a_class_that_the_module_does_not_define_is_named_without_running_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_envs.py").write_text("import missing_package\nclass Sums: pass\nAlias = Sums\n")
    monkeypatch.chdir(tmp_path)
    (problem,) = findings(tmp_path, "environment.name=own_envs:Sum").problems
    assert "own_envs defines no class Sum" in problem.what
    assert (problem.nearest, problem.allowed) == ("Sums", "one of its classes: Sums")
    assert findings(tmp_path, "environment.name=own_envs:Alias").problems == ()
    (tmp_path / "own_envs.py").write_text("if True:\n    class Hidden: pass\n")
    assert findings(tmp_path, "environment.name=own_envs:Hidden").problems == ()


def test_an_environment_of_your_own_is_found_in_the_current_folder_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_envs").mkdir()
    (tmp_path / "my_envs" / "math.py").write_text("raise AssertionError('imported')")
    monkeypatch.chdir(tmp_path)
    assert findings(tmp_path, "environment.name=my_envs.math:Env").problems == ()
    (problem,) = findings(tmp_path, "environment.name=my_envs.maths:Env").problems
    assert "there is no module my_envs.maths" in problem.what


class DiskUsage(NamedTuple):
    free: int


def test_too_little_space_is_said_in_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shutil.disk_usage", lambda _: DiskUsage(free=95)
    )  # two versions of 12 parameters in float32 take 96 bytes
    found = findings(tmp_path)
    assert [p.path for p in found.problems] == ["weight_sync.dir"]
    assert [p.path for p in found.warnings] == ["run.dir"]
    found = findings(tmp_path, "model.dtype=bfloat16")
    assert found.problems == ()


def test_folders_that_may_not_be_written_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the tests may run as root, who may write anywhere
    found = findings(tmp_path, f"run.dir={tmp_path / 'runs' / 'a'}")
    assert [p.path for p in found.problems] == ["run.dir", "weight_sync.dir"]
    assert found.problems[0].what == f"{tmp_path / 'runs' / 'a'}: {tmp_path} cannot be written to"
