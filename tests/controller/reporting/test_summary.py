"""The summary says what became of every rollout, and never that sums agree when they do not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anyio import CancelScope
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from controller.reporting.summary import (
    Accounts,
    RunSummary,
    format_summary,
    package_versions,
    reward_edges,
    write_summary,
)
from tests.controller.reporting.reports import step_report

pytestmark = pytest.mark.anyio


def accounts(**changes: int) -> Accounts:
    return Accounts(**{"dispatched": 640, "trained": 620, "evicted": 12, "dropped": 0, "aborted": 8} | changes)


def summary(**changes: Any) -> RunSummary:
    fields: dict[str, Any] = {
        "name": "a-run",
        "status": "finished",
        "reason": None,
        "steps": 40,
        "planned_steps": 40,
        "seconds": 312.0,
        **structs.asdict(accounts()),
        "groups": accounts(dispatched=80, trained=77, evicted=2, aborted=1),
        "drop_reasons": {},
        "rows_left": {"staging": 0, "train": 0},
        "children_left": 0,
        "weight_version": 40,
        "reward_first": 0.0841,
        "reward_last": 0.412,
        "versions": {"torch": "2.13.0"},
    }
    return RunSummary(**fields | changes)


def test_the_printed_summary_of_a_clean_run():
    assert format_summary(summary(), Path("runs/a-run")).splitlines() == [
        "finished: 40 of 40 steps in 5m 12s",
        "  reward    0.0841 -> 0.412  (first and last 5 steps)",
        "  rollouts  dispatched 640 = trained 620 + evicted 12 + dropped 0 + aborted 8   lost=0 duplicated=0",
        "  groups    dispatched 80 = trained 77 + evicted 2 + dropped 0 + aborted 1   lost=0 duplicated=0",
        "  left      0 staging rows, 0 train rows, 0 processes",
        "  weights   version 40",
        "  files     runs/a-run",
    ]
    assert summary().clean


def test_the_printed_summary_of_a_failed_run():
    failed = summary(
        status="failed",
        reason="WorkerDied: gen-0 exited with -9\nand a long story",
        steps=0,
        dispatched=643,
        lost=3,
        drop_reasons={"wrong_digest": 2, "rollout_timeout": 5},
        reward_first=None,
        reward_last=None,
    )
    text = format_summary(failed, Path("runs/a-run"))
    assert text.splitlines()[:3] == [
        "failed: 0 of 40 steps in 5m 12s",
        "  reason    WorkerDied: gen-0 exited with -9",
        "  rollouts  dispatched 643 != trained 620 + evicted 12 + dropped 0 + aborted 8"
        "   lost=3 duplicated=0 unaccounted=3",
    ]
    assert "  dropped   rollout_timeout 5, wrong_digest 2" in text
    assert "reward" not in text
    assert not failed.clean


@given(st.builds(Accounts, **dict.fromkeys(Accounts.__struct_fields__, st.integers(0, 1000))))
def test_an_equation_is_printed_only_when_it_holds(rollouts):
    made = summary(**structs.asdict(rollouts))
    line = format_summary(made, Path("run")).splitlines()[2]
    total = rollouts.trained + rollouts.evicted + rollouts.dropped + rollouts.aborted
    assert (" = " in line) == (rollouts.dispatched == total)
    assert made.clean == (" = " in line and "lost=0 duplicated=0" in line)


@pytest.mark.parametrize("changes", [{"rows_left": {"staging": 1, "train": 0}}, {"children_left": 1}])
def test_a_run_that_leaves_something_behind_is_not_clean(changes):
    assert not summary(**changes).clean


def test_reward_edges_are_means_over_the_first_and_last_five_steps_or_half_of_fewer():
    reports = [step_report(step, reward_mean=float(step)) for step in range(1, 21)]
    assert reward_edges(reports) == (3.0, 18.0)
    assert reward_edges(reports[:4]) == (1.5, 3.5)
    assert reward_edges(reports[:3]) == (1.0, 3.0)
    assert reward_edges(reports[:1]) == (1.0, 1.0)
    assert "(first and last 2 steps)" in format_summary(summary(steps=4, reward_first=1.5, reward_last=3.5), Path())
    assert "(first and last step)" in format_summary(summary(steps=3, reward_first=1.0, reward_last=3.0), Path())
    assert reward_edges([step_report(1, reward_mean=math.nan)]) == (None, None)
    assert reward_edges([]) == (None, None)


async def test_the_file_is_the_summary_also_when_the_run_is_cancelled(tmp_path):
    with CancelScope() as scope:
        scope.cancel()
        await write_summary(tmp_path, summary())
    data = (tmp_path / "summary.json").read_bytes()
    assert msgspec.json.decode(data, type=RunSummary) == summary()
    assert data.startswith(b'{\n  "dispatched": 640')


async def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(OSError, match="run"):
        await write_summary(tmp_path / "run", summary())


def test_versions_are_of_installed_packages_only():
    versions = package_versions(["msgspec", "no-such-package"])
    assert list(versions) == ["msgspec"]
