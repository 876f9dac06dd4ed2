"""A sampler of one's own: the documented one works, and mistakes are found before a run starts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.config.problems import ConfigError
from controller.config.schema import RolloutConfig
from controller.own_sampler import make_sampler
from controller.samplers import Windowed
from tests.controller.test_samplers import SimulatedRun

PAGE = Path(__file__).parents[2] / "docs" / "samplers.md"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file to write `mine` to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "mine.py"
    sys.modules.pop("mine", None)


def made(name: str, **args: Any) -> Any:
    return make_sampler(RolloutConfig(groups_per_step=3, max_staleness=1, sampler=name, sampler_args=args))


def test_the_documented_one_trains_every_step_within_the_staleness_bound(module: Path) -> None:
    found = re.search(r"<!-- example -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    module.write_text(found[1])
    for seed in range(20):
        run = SimulatedRun(made("mine:LongestFirst"), steps=8, seed=seed, drop_rate=0.2)
        run.run()
        assert [len(batch) for batch in run.batches] == [3] * 8
        assert max(run.staleness) <= 1


def test_a_built_in_one_is_made_by_its_name() -> None:
    assert isinstance(made("windowed"), Windowed)


@pytest.mark.parametrize(
    ("text", "args", "what"),
    [
        ("", {}, "has no attribute 'Mine'"),
        ("import nothing_of_this_name", {}, "No module named 'nothing_of_this_name'"),
        ("class Mine:\n  def __init__(self, **_): pass", {}, "has no method required_capacity, admit, select, evict"),
        ("class Mine:\n  def __init__(self, groups_per_step, max_staleness): pass", {"x": 1}, "argument 'x'"),
    ],
)
def test_mistakes_are_named(module: Path, text: str, args: dict[str, Any], what: str) -> None:
    module.write_text(text)
    with pytest.raises(ConfigError, match=f"rollout.sampler: mine:Mine.*{what}"):
        made("mine:Mine", **args)


def test_too_small_a_capacity_is_a_deadlock_and_named_as_one(module: Path) -> None:
    base = "from controller.samplers import ReadyFirst\nclass Mine(ReadyFirst):\n"
    module.write_text(f"{base}  def required_capacity(self): return 2")
    with pytest.raises(ConfigError, match="is 2: a step needs 3 groups at the same time"):
        made("mine:Mine")
