"""Loading: what is wrong is named with place, value and what is allowed, all at once; what is right comes out typed."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from controller.config.load import load_config
from controller.config.problems import ConfigError, Problem
from tests.controller.config.files import write_config

VALID = """\
run: {dir: runs/a, steps: 10}
model: {path: models/m}
environment: {name: reverse_text}
"""


def problems(path: Path, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    for problem in caught.value.problems:
        assert problem.what in str(caught.value)
        assert problem.source
    return caught.value.problems


WRONG = [
    ("run.steps=0", "run.steps", "0 is", "an integer >= 1"),
    ("run.steps=-3", "run.steps", "-3 is", "an integer >= 1"),
    ("run.steps=2.5", "run.steps", "2.5 is", "an integer >= 1"),
    ("run.steps=true", "run.steps", "true is", "an integer >= 1"),
    ("run.steps=", "run.steps", "null is", "an integer >= 1"),
    ("run.steps=" + "9" * 25, "run.steps", "9" * 25, "an integer >= 1"),
    ("run.dir=", "run.dir", "null is", "a path"),
    ('run.dir=""', "run.dir", '"" is', "a path"),
    ('run.dir="a\\0b"', "run.dir", "NUL", "a path"),
    ("run.seed=4294967296", "run.seed", "4294967296 is", "an integer >= 0 and < 4294967296"),
    ("model.dtype=float16", "model.dtype", '"float16" is', "bfloat16 or float32"),
    ("model.path=[a]", "model.path", '["a"] is', "a path"),
    ("environment.args=3", "environment.args", "3 is", "a mapping of names to values"),
    ("environment.args.x=.nan", "environment.args.x", "NaN is not allowed: a number must be finite", ""),
    ("environment.args={a: [1, -.inf]}", "environment.args.a.1", "-Infinity is not", ""),
    ("rollout.group_size=eight", "rollout.group_size", '"eight" is', "an integer >= 1"),
    ("rollout.max_staleness=-1", "rollout.max_staleness", "-1 is", "an integer >= 0"),
    ("rollout.over_sampling=0.5", "rollout.over_sampling", "0.5 is", "a number >= 1 and <= 100"),
    ("rollout.over_sampling=.inf", "rollout.over_sampling", "finite", "a number >= 1 and <= 100"),
    ("rollout.temperature=-0.1", "rollout.temperature", "-0.1 is", "a number >= 0"),
    ("rollout.temperature=.nan", "rollout.temperature", "finite", "a number >= 0"),
    ("rollout.temperature=1e999", "rollout.temperature", "finite", "a number >= 0"),
    ("rollout.top_p=0", "rollout.top_p", "0 is", "a number > 0 and <= 1"),
    ("rollout.top_p=1.01", "rollout.top_p", "1.01 is", "a number > 0 and <= 1"),
    ("rollout.max_in_flight_groups=0", "rollout.max_in_flight_groups", "0 is", "an integer >= 1 or null"),
    ("rollout.stop_token_ids=[1, -2]", "rollout.stop_token_ids", "[1, -2] is", "a list, each an integer >= 0"),
    ("rollout.timeout_s=0", "rollout.timeout_s", "0 is", "seconds, a number > 0 and <= 1e7"),
    ("generation.device=gpu", "generation.device", '"gpu" is', "cpu, cuda or cuda:N"),
    ("generation.device='cuda:'", "generation.device", '"cuda:" is', "cpu, cuda or cuda:N"),
    (
        "training.optimizer.betas=[0.9]",
        "training.optimizer.betas",
        "[0.9] is",
        "a list of 2, each a number >= 0 and < 1",
    ),
    ("training.optimizer.betas=[0.9, 1.0]", "training.optimizer.betas", "[0.9, 1.0] is", "a list of 2"),
    ("training.loss=3", "training.loss", "3 is not a section", "the keys aggregation, clip_low"),
    ("training.loss.clip_low=1.5", "training.loss.clip_low", "1.5 is", "a number > 0 and <= 1"),
    ("training.loss.kl_estimator=k4", "training.loss.kl_estimator", '"k4" is', "k1, k2 or k3"),
    ("checkpoint.every_steps=0", "checkpoint.every_steps", "0 is", "an integer >= 1 or null"),
    ("wach=1", "wach", "unknown key", "run, model, environment"),
]


@pytest.mark.parametrize(("override", "path", "what", "allowed"), WRONG)
def test_a_wrong_value_is_named_with_its_place_and_what_is_allowed(
    tmp_path: Path, override: str, path: str, what: str, allowed: str
) -> None:
    (problem,) = problems(write_config(tmp_path, VALID), override)
    assert problem.path == path
    assert what in problem.what
    assert allowed in problem.allowed
    assert problem.source == f"--set {override}"


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("rollout.groups_per_stp=4", "rollout.groups_per_step"),
        ("rolout.group_size=4", "rollout"),
        ("rollout.lr=1e-6", "training.optimizer.lr"),
        ("optimizer.lr=1e-6", "training.optimizer"),
        ("training.loss.kl_coeff=0", "training.loss.kl_coef"),
        ("rollout.sampler=windwed", "windowed"),
        ("rollout.qqqqq=1", None),
    ],
)
def test_an_unknown_name_gets_the_nearest_valid_one(tmp_path: Path, override: str, nearest: str | None) -> None:
    assert problems(write_config(tmp_path, VALID), override)[0].nearest == nearest


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("run.steps='40'", "write 40"),
        ("run.steps=4e1", "write 40"),
        ("run.steps=1_000", "write 1000"),
        ("rollout.temperature='5e-1'", "write 0.5"),
        ("rollout.stop_token_ids=5", "write [5]"),
        ("model.path=5", 'write "5"'),
        ("checkpoint.every_steps=often", ""),
    ],
)
def test_a_value_of_the_wrong_type_is_shown_as_it_should_be_written(tmp_path: Path, override: str, remedy: str) -> None:
    assert problems(write_config(tmp_path, VALID), override)[0].remedy == remedy


def test_all_problems_are_reported_at_once_and_readably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = """\
        run:
          dir: runs/a
        model:
        environment:
          name: reverse_text
        rollout:
          groups_per_stp: 4
          group_size: 0
          group_size: 8
          lr: 1e-6
          sampler: windwed
          temperature: .inf
        training:
          optimizer: {betas: [0.9, 0.95, 0.99]}
        generation: 2
        """
    write_config(tmp_path, dedent(text))
    with pytest.raises(ConfigError) as caught:
        load_config("run.yaml", ["rollout.top_p=2", "rollout.timeout_s", "generation.workers=2"])
    keys = (
        "groups_per_step, group_size, max_staleness, sampler, sampler_args, staleness_from, freshest_first, "
        "min_step_batch_fraction, over_sampling, max_in_flight_groups, max_tokens, "
        "temperature, top_p, top_k, stop_token_ids, max_calls, timeout_s, turn_timeout_s, call_timeout_s"
    )
    expected = f"""\
12 problems in the configuration
  1. rollout.group_size: is given twice  (run.yaml line 9)
     fix: remove one; the other is at run.yaml line 8
  2. rollout.timeout_s: is not an override  (--set rollout.timeout_s)
     allowed: section.key=value
  3. generation: is 2, so it has no key workers  (--set generation.workers=2)
  4. run.steps: is missing  (run.yaml line 1)
     allowed: an integer >= 1
  5. model.path: is missing  (run.yaml line 3)
     allowed: a path
  6. rollout.groups_per_stp: unknown key  (run.yaml line 7)
     did you mean: rollout.groups_per_step
     allowed: {keys}
  7. rollout.lr: unknown key  (run.yaml line 10)
     did you mean: training.optimizer.lr
     allowed: {keys}
  8. rollout.sampler: "windwed" is not allowed  (run.yaml line 11)
     did you mean: windowed
     allowed: windowed, ready_first, weight_fifo, in_order or module:Class
  9. rollout.temperature: Infinity is not allowed: a number must be finite  (run.yaml line 12)
     allowed: a number >= 0
 10. rollout.top_p: 2 is not allowed  (--set rollout.top_p=2)
     allowed: a number > 0 and <= 1
 11. generation: 2 is not a section  (run.yaml line 15)
     allowed: the keys engine, vllm, workers, max_batch, max_model_len, device, threads
 12. training.optimizer.betas: [0.9, 0.95, 0.99] is not allowed  (run.yaml line 14)
     allowed: a list of 2, each a number >= 0 and < 1"""
    assert str(caught.value) == expected


def test_missing_sections_are_reported_key_by_key(tmp_path: Path) -> None:
    found = problems(write_config(tmp_path, "rollout: {group_size: 4}"))
    assert [p.path for p in found] == ["run.dir", "run.steps", "model.path", "environment.name"]


def test_yaml_is_read_by_the_1_2_core_schema(tmp_path: Path) -> None:
    text = """\
        run: {dir: off, steps: 010}
        model: {path: 1:30}
        environment:
          name: reverse_text
          args: {a: yes, b: 2024-01-02, c: 0x10, d: "1", e: 5e-4, f: true, g: ~, h: -.5, i: 1_000, 2: x}
        training: {optimizer: {lr: 5e-4, eps: 1e-8}}
        rollout:
        """
    config = load_config(write_config(tmp_path, dedent(text)))
    assert (config.run.dir, config.run.steps, config.model.path) == ("off", 10, "1:30")
    args = {"a": "yes", "b": "2024-01-02", "c": 16, "d": "1", "e": 5e-4, "f": True, "g": None, "h": -0.5, "i": "1_000"}
    assert config.environment.args == args | {"2": "x"}
    assert (config.training.optimizer.lr, config.training.optimizer.eps) == (5e-4, 1e-8)
    assert config.rollout.group_size == 8


def test_toml_and_yaml_give_the_same_config(tmp_path: Path) -> None:
    toml = """\
        run = {dir = "runs/a", steps = 10}
        model.path = "models/m"
        [environment]
        name = "reverse_text"
        """
    assert load_config(write_config(tmp_path, dedent(toml), "run.toml")) == load_config(write_config(tmp_path, VALID))


def test_a_toml_date_is_refused(tmp_path: Path) -> None:
    toml = (
        '[run]\ndir = 2024-01-02\nsteps = 1\n[model]\npath = "m"\n[environment]\nname = "e"\nargs.when = 2024-01-02\n'
    )
    found = problems(write_config(tmp_path, toml, "run.toml"))
    assert [p.path for p in found] == ["run.dir", "environment.args.when"]
    assert all("a date has no place in a configuration" in p.what for p in found)


def test_overrides_replace_what_the_file_has_and_the_last_wins(tmp_path: Path) -> None:
    path = write_config(tmp_path, VALID + "rollout: {group_size: 4, top_k: 7}\n")
    config = load_config(
        path,
        [
            "rollout.group_size=2",
            "rollout.group_size=16",
            "environment.args.words.max=5",
            'environment.args.note={"a": [1, null]}',
            "checkpoint.every_steps=null",
            "training.loss={clip_low: 0.1}",
            "run.dir=runs/b=c",
        ],
    )
    assert (config.rollout.group_size, config.rollout.top_k) == (16, 7)
    assert config.environment.args == {"words": {"max": 5}, "note": {"a": [1, None]}}
    assert config.training.loss.clip_low == 0.1
    assert config.run.dir == "runs/b=c"


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("x", "is not an override"),
        ("=1", "is not an override"),
        ("run..steps=1", "is not an override"),
        ("run.steps.x=1", "is 10, so it has no key x"),
        ("rollout.top_k=[1", "is not YAML"),
        ("rollout.top_k=&a 1", "anchors and aliases"),
        ("rollout.top_k={a: 1, a: 2}", "is given twice"),
    ],
)
def test_a_malformed_override_is_named(tmp_path: Path, override: str, what: str) -> None:
    found = problems(write_config(tmp_path, VALID), override)
    assert what in found[0].what
    assert found[0].source == f"--set {override}"


@pytest.mark.parametrize(
    ("text", "what", "source"),
    [
        ("", "the file is empty", ""),
        ("# nothing\n", "the file is empty", ""),
        ("---\n", "the file is empty", ""),
        ("- run\n- model\n", 'the file holds ["run", "model"]', ""),
        ("just text", 'the file holds "just text"', ""),
        ("run:\n  dir: [a\n", "is not YAML: while parsing a flow sequence", " line 3, column 1"),
        (
            "run:\n\tdir: a\n",
            "is not YAML: while scanning for the next token, found character '\\t'",
            " line 2, column 1",
        ),
        ("run:\n  steps: 1\n dir: a\n", "is not YAML: ", " line 3, column 2"),
        ("run: \x01", "is not YAML: unacceptable character", ""),
        ('run: "\\UFFFFFFFF"', "is not YAML: ", ""),
        ("a: &x 1\nb: *x\n", "anchors and aliases (& and *) are not supported", " line 1"),
        ("a: !!python/object:os.system 1\n", "tags (!) are not supported", " line 1"),
        ("a: 1\n---\nb: 1\n", "a second document begins here", " line 2"),
        ("? [a]\n: 1\n", "a key must be plain text", " line 1"),
        ("a: " + "[" * 10_000, "is nested more than 32 deep", " line 1"),
    ],
)
def test_an_unreadable_file_gets_one_clear_message(tmp_path: Path, text: str, what: str, source: str) -> None:
    path = write_config(tmp_path, text)
    (problem,) = problems(path)
    assert what in problem.what
    assert problem.source == f"{path}{source}"


def test_a_file_that_is_not_there_or_not_a_file_gets_one_clear_message(tmp_path: Path) -> None:
    (missing,) = problems(tmp_path / "nothing.yaml")
    assert missing.what == "no such file"
    (folder,) = problems(tmp_path)
    assert folder.what == "is a folder, not a file"
    (long,) = problems(tmp_path / ("x" * 300))
    assert long.what == "cannot be read: File name too long"
    (tmp_path / "huge.yaml").write_bytes(b"#" * (1 << 20) + b"\n")
    (huge,) = problems(tmp_path / "huge.yaml")
    assert huge.what == "is larger than 1 MiB"
    (tmp_path / "latin1.yaml").write_bytes(VALID.encode() + "# é".encode("latin-1"))
    (latin1,) = problems(tmp_path / "latin1.yaml")
    assert latin1.what == f"is not UTF-8: byte 0xe9 at {len(VALID) + 2}"
    assert latin1.source.endswith("line 4")
    (toml,) = problems(write_config(tmp_path, "run = {\n", "bad.toml"))
    assert toml.what.startswith("is not TOML: ")
    assert "line 1" in toml.what
    (deep,) = problems(write_config(tmp_path, "a = " + "[" * 5000, "deep.toml"))
    assert deep.what == "is nested too deeply"


def test_a_file_that_may_not_be_read_gets_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = write_config(tmp_path, VALID)
    monkeypatch.setattr(Path, "open", refuse)  # the tests may run as root, who may read anything
    (problem,) = problems(path)
    assert problem.what == "cannot be read: Permission denied"


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    assert load_config(write_config(tmp_path, "\ufeff" + VALID)).run.steps == 10
