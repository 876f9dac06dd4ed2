"""Whole runs, two generation workers each, whose weights go another way than by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from controller import Config, Controller
from tests.e2e.running import conserved

pytestmark = [pytest.mark.slow, pytest.mark.campaign]

OWN = "tests.workers.weight_sync.own:FolderTransport"


@pytest.mark.parametrize(
    "sync",
    [
        {"transport": "gloo", "mode": "abort"},
        {"transport": OWN, "mode": "drain", "drain_timeout_s": 20.0},
    ],
    ids=["gloo-abort", "own-drain"],
)
def test_a_run_trains_and_accounts_for_every_rollout(
    config: dict[str, Any], tmp_path: Path, sync: dict[str, Any]
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    own = {"args": {"folder": str(folder)}} if ":" in sync["transport"] else {"dir": str(folder)}
    whole = config | {
        "run": {"dir": str(tmp_path / "run"), "steps": 4},
        "generation": {"workers": 2},
        "rollout": config["rollout"] | {"max_tokens": 100},
        "weight_sync": sync | own | {"timeout_s": 30.0},
    }

    async def program() -> None:
        with anyio.fail_after(150):
            async with Controller(msgspec.convert(whole, Config)) as controller:
                await controller.run()

    anyio.run(program)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 4)
    assert conserved(summary)
    if sync["transport"] == "gloo":
        assert list(folder.iterdir()) == [], "nothing of the run's weights is left"
    else:
        assert {path.name for path in folder.iterdir()} >= {"step-1", "step-3"}
