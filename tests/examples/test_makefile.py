"""The Makefile's own promises, without installing anything."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import ROOT, run


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def done(checkout: Path, *files: str) -> None:
    """As if `make` had made these."""
    for file in files:
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        (checkout / file).touch()


def test_an_old_python_is_refused_with_what_to_do(checkout: Path) -> None:
    old = checkout / "old-python"
    pretend = "import sys; sys.version_info = (3, 10, 2); exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{pretend}" "$2"\n')
    old.chmod(0o755)

    output = run("make", "run", f"PYTHON={old}", cwd=checkout, code=2)

    assert f"Python 3.11 or newer is needed; {old} is 3.10. Name another one: make PYTHON=python3.12 run" in output
    assert not (checkout / ".venv").exists()


def test_torch_is_installed_before_what_depends_on_it_and_is_the_user_s_choice(checkout: Path) -> None:
    commands = run("make", "-n", "install", "TORCH=torch==2.13.0 --index-url URL", cwd=checkout).splitlines()
    torch, rest = (next(i for i, line in enumerate(commands) if part in line) for part in ("URL", "--editable"))
    assert torch < rest
    assert commands[torch].endswith("pip install --quiet torch==2.13.0 --index-url URL")


def test_what_is_installed_and_made_is_not_made_again(checkout: Path) -> None:
    done(checkout, ".venv/.installed", "models/quickstart/warm_start.json")
    for target, program in (("run", "controller"), ("test", "pytest")):
        (command,) = run("make", "-n", target, "ARGS=--more", cwd=checkout).splitlines()
        assert command.startswith(f".venv/bin/python -m {program} ")
        assert command.endswith(" --more")


def test_new_dependencies_are_installed(checkout: Path) -> None:
    done(checkout, ".venv/.installed", "models/quickstart/warm_start.json")
    os.utime(checkout / ".venv/.installed", (0, 0))
    commands = run("make", "-n", "run", cwd=checkout)
    assert "--editable" in commands
    assert "prepare_quickstart" not in commands
