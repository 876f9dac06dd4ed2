"""The command line: what it prints, how it exits, and that a check starts and imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT, SIGTERM
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest

import controller
from controller.checkpoint import CheckpointError
from controller.cli import main
from controller.config.problems import ConfigError, Problem
from controller.exits import Exit
from controller.interrupts import Interrupted
from controller.run_dir import RunDirError
from controller.sentinel.sentinel import LoopBlocked
from controller.sentinel.stacks import Place
from controller.sentinel.stalls import Stall
from controller.watchdog import RunStalled
from tests.controller.config.files import valid, write_config
from workers.environments.registry import BadEnvironment


@pytest.fixture
def config(tmp_path: Path) -> Path:
    values = valid(tmp_path)
    values["training"] = {"max_tokens_per_microbatch": 512}
    return write_config(tmp_path, json.dumps(values))


HEAVY = {
    "torch",
    "ray",
    "vllm",
    "transformers",
    "transfer_queue",
    "matplotlib",
    "aiohttp",
    "tensorboard",
    "numpy",
    "rich",
}


def test_a_check_prints_the_plan_and_imports_nothing_heavy(config: Path) -> None:
    code = (
        "import sys\n"
        "from controller.cli import main\n"
        "code = main(['--config', sys.argv[1], '--check'])\n"
        "print(code, [m for m in sys.argv[2:] if m in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(config), *HEAVY], capture_output=True, text=True, timeout=60)
    assert done.stderr == "0 []\n"
    assert "groups live            32 = 16 per step x (1 stale + 1), windowed" in done.stdout
    assert not (config.parent / "run").exists()


def test_importing_the_package_is_light_and_gives_its_public_names() -> None:
    code = (
        "import sys, controller\n"
        "assert set(controller.__all__) > {'Config', 'load_config'}\n"
        "controller.Config, controller.load_config, controller.Environment, controller.Prompt\n"
        "print([m for m in sys.argv[1:] if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *HEAVY], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    with pytest.raises(AttributeError, match="has no attribute 'Controler'"):
        _ = controller.Controler  # type: ignore[attr-defined]


def test_the_module_is_a_program_with_exit_code_2_for_a_wrong_config(config: Path) -> None:
    command = [sys.executable, "-m", "controller", "--config", str(config), "--set", "rollout.group_size=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "1 problem in the configuration\n"
        "  1. rollout.group_size: 1 with advantage.estimator grpo\n"
        "     allowed: >= 2 with grpo: the baseline is the group's other rollouts, so alone the advantage is 0\n"
        "     fix: set rollout.group_size: 8\n"
    )


def test_warnings_are_printed_and_do_not_stop_it(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(config), "--set", "rollout.top_p=0.9", "--check"]) == Exit.FINISHED
    printed = capsys.readouterr()
    assert printed.err.startswith("warning: rollout.top_p: ")
    assert "* rollout.top_p                       0.9" in printed.out


@pytest.mark.parametrize(
    ("arguments", "code"), [([], 2), (["--help"], 0), (["--version"], 0), (["--config"], 2), (["--conf", "x"], 2)]
)
def test_usage_errors_exit_with_2_and_help_with_0(arguments: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == code


def test_help_names_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    for code in Exit:
        assert f"  {code.value:<4} {code.meaning}" in printed


def test_the_page_on_running_has_every_exit_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text(encoding="utf-8")
    for code in Exit:
        assert f"| {code.value} | {code.meaning} |\n" in page


def test_a_missing_file_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path / "run.yaml")]) == Exit.USAGE
    missing = f"  1. {tmp_path / 'run.yaml'}: no such file\n     fix: looked for {tmp_path / 'run.yaml'}\n"
    assert capsys.readouterr().err == f"1 problem in the configuration\n{missing}"


class Outcome:
    """Stands in for the Controller, whose own tests run the real one: ends as it is told, and keeps what it was given."""

    def __init__(self, ending: Callable[[], Any]) -> None:
        self.ending = ending
        self.given: dict[str, Any] = {}

    def __call__(self, config: controller.Config, **given: Any) -> Self:
        self.given = {"config": config, **given}
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def run(self) -> Any:
        return self.ending()


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Outcome]:
    def install(end: Callable[[], Any]) -> Outcome:
        outcome = Outcome(end)
        module = ModuleType("controller.controller")
        module.Controller = outcome  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "controller.controller", module)
        return outcome

    return install


def raiser(error: BaseException) -> Callable[[], Any]:
    def end() -> Any:
        raise error

    return end


@pytest.mark.parametrize(
    ("status", "reason", "code"),
    [
        ("finished", None, 0),
        ("failed", "worker died", 1),
        ("stalled", "no progress", 3),
        ("interrupted", "SIGINT", 130),
        ("interrupted", "SIGTERM", 143),
    ],
)
def test_the_summary_decides_the_exit_code(
    config: Path, ending: Any, status: str, reason: str | None, code: int
) -> None:
    ending(lambda: SimpleNamespace(status=status, reason=reason))
    assert main(["--config", str(config)]) == code


PLACE = Place("envs.py", 3, "rollout")
BLOCKED = "the event loop was blocked for 0.30 s at envs.py:3 in rollout"


def noted(error: BaseException, note: str) -> BaseException:
    error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("bad rows"), 1, "ValueError: bad rows\n"),
        (ValueError(), 1, "ValueError\n"),
        (noted(ValueError("bad rows"), "in step 3"), 1, "ValueError: bad rows\nin step 3\n"),
        (BaseExceptionGroup("", [ExceptionGroup("", [KeyError("a")]), ValueError("b")]), 1, "KeyError: 'a'\n"),
        (
            LoopBlocked(Stall(str(PLACE), 0.3, (PLACE,)), 50),
            4,
            f"LoopBlocked: {BLOCKED} (the limit is 50 ms)\n    {PLACE}\n",
        ),
        (RunStalled("no progress for 900 s\nwaits"), 3, "RunStalled: no progress for 900 s\nwaits\n"),
    ],
)
def test_a_failed_run_says_what_failed_and_where_its_traceback_is(
    config: Path, ending: Any, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    ending(raiser(error))
    assert main(["--config", str(config)]) == code
    log = config.parent / "run" / "error.log"
    assert capsys.readouterr().err == f"{message}traceback: {log}\n"
    assert "in raiser" in log.read_text() or "in end" in log.read_text()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError([Problem(path="a.b", what="is bad")]), 2, "1 problem in the configuration\n  1. a.b: is bad\n"),
        (BadEnvironment("environment.name: no"), 2, "environment.name: no\n"),
        (RunDirError("another run is using it"), 2, "another run is using it\n"),
        (CheckpointError("no checkpoint"), 2, "no checkpoint\n"),
        (Interrupted(SIGTERM), 143, f"{Interrupted(SIGTERM)}\n"),
        (Interrupted(SIGINT), 130, f"{Interrupted(SIGINT)}\n"),
        (KeyboardInterrupt(), 130, "interrupted before the run could stop in order\n"),
    ],
)
def test_what_the_user_must_mend_leaves_no_traceback(
    config: Path, ending: Any, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    ending(raiser(error))
    assert main(["--config", str(config)]) == code
    assert capsys.readouterr().err == message
    assert not (config.parent / "run").exists()


def test_a_traceback_is_printed_on_demand(
    config: Path, ending: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ending(raiser(ValueError("bad rows")))
    assert main(["--config", str(config), "--traceback"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    monkeypatch.setenv("MONOLOOP_TRACEBACK", "1")
    assert main(["--config", str(config)]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_the_traceback_is_not_lost_when_it_cannot_be_written(
    config: Path, ending: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / "run" / "error.log").mkdir(parents=True)
    ending(raiser(ValueError("bad rows")))
    assert main(["--config", str(config)]) == 1
    printed = capsys.readouterr().err
    assert "error.log cannot be written (Is a directory)" in printed
    assert "Traceback (most recent call last)" in printed


@pytest.mark.parametrize(
    ("arguments", "resume"),
    [([], "auto"), (["--resume", "never"], "never"), (["--resume", "runs/a/step-000004"], Path("runs/a/step-000004"))],
)
def test_the_controller_gets_the_config_and_the_resume_choice(
    config: Path, ending: Any, arguments: list[str], resume: str | Path
) -> None:
    outcome = ending(lambda: SimpleNamespace(status="finished", reason=None))
    assert main(["--config", str(config), "--set", "run.steps=3", *arguments]) == 0
    assert outcome.given["resume"] == resume
    assert outcome.given["config"].run.steps == 3
