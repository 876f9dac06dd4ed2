"""A folder as a user has it: the examples, and the quickstart's model (untrained, which takes a second), which also stands
for the pretrained one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANG_GUARD_S = 240
SHORT = ("--skill", "0", "--softening-steps", "0")
"""Leaves all training out of the quickstart's preparation."""


def run(*command: str, cwd: Path, code: int = 0) -> str:
    """Run a program of this repository to its end; its exit code must be `code`. Returns all that it printed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**_environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_GUARD_S,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def _environment() -> dict[str, str]:
    """This process's, without what the `make test` around it would tell another make."""
    of_make = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS")
    return {name: value for name, value in os.environ.items() if name not in of_make}


@pytest.fixture(scope="session")
def untrained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "quickstart"
    run(sys.executable, str(ROOT / "examples" / "prepare_quickstart.py"), str(out), *SHORT, cwd=out.parent)
    return out


@pytest.fixture
def workspace(tmp_path: Path, untrained_model: Path) -> Path:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "models").mkdir()
    for name in ("quickstart", "smollm2"):
        (tmp_path / "models" / name).symlink_to(untrained_model)
    return tmp_path
