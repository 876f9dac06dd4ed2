from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workers.environments.registry import BUILTIN, BadEnvironment, make_environment
from workers.environments.reverse_text import ReverseText

SOURCE = """
from __future__ import annotations
import threading
from typing import TYPE_CHECKING, Any, Literal

from workers.environments.base import Environment

if TYPE_CHECKING:
    from somewhere import Elsewhere

class Good:
    def __init__(self, count: int, mode: Literal["fast", "slow"] = "fast", *, limits: tuple[int, ...] = (1,)) -> None:
        if count < 0:
            raise ValueError(f"count: at least 0; got {count}")
        self.count, self.mode, self.limits = count, mode, limits
    def prompts(self, seed): yield from ()
    async def rollout(self, ctx, prompt): ...

class AnyArgs(Good):
    def __init__(self, **options) -> None: self.options = options

class NoArgs(Good):
    def __init__(self) -> None: ...

class OddAnnotations(Good):
    def __init__(self, lock: threading.Lock | str | None = None) -> None: self.lock = lock

class CheckersOnly(Good):
    def __init__(self, other: Elsewhere) -> None: self.other = other

class NoRollout:
    def prompts(self, seed): yield from ()

class BlockingRollout(NoRollout):
    def rollout(self, ctx, prompt): ...

class OnlyDeclared(Environment): ...

def function(): ...
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "registry_sample.py").write_text(SOURCE)
    (tmp_path / "registry_broken.py").write_text("import a_missing_dependency\n")
    (tmp_path / "registry_crash.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.startswith("registry_")]:
        del sys.modules[name]


def problems(name: str, args: dict[str, object] | None = None) -> tuple[str, ...]:
    with pytest.raises(BadEnvironment) as caught:
        make_environment(name, args or {})
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def test_a_built_in_environment_is_made_by_name() -> None:
    assert isinstance(make_environment("reverse_text", {"min_length": 2, "max_length": 3}), ReverseText)


def test_every_built_in_name_leads_to_an_environment() -> None:
    for name in BUILTIN:
        args = {
            "agent_process": {"command": ["python"], "prompts": "registry_sample:function"},
            "reasoning_gym": {"task": "chain_sum"},
        }.get(name, {})
        assert callable(make_environment(name, args).prompts)


def test_a_class_of_the_current_directory_is_made_with_converted_arguments() -> None:
    made = make_environment("registry_sample:Good", {"count": 3, "mode": "slow", "limits": [4, 5]})
    assert vars(made) == {"count": 3, "mode": "slow", "limits": (4, 5)}


def test_an_unknown_name_lists_what_there_is() -> None:
    (problem,) = problems("revers_text")
    assert "environment.name: there is no environment 'revers_text' (did you mean reverse_text?)" in problem
    assert "built in are agent_process, reasoning_gym, reverse_text, and your own is module:Class" in problem


@pytest.mark.parametrize("name", ["", ":", "module:", ":Class", "os.path"])
def test_a_name_that_is_neither_built_in_nor_a_class_is_refused(name: str) -> None:
    assert f"there is no environment {name!r}" in problems(name)[0]


def test_a_missing_module_is_told_from_a_missing_import_in_it() -> None:
    assert "there is no module 'registry_absent', neither installed nor in" in problems("registry_absent:X")[0]
    assert (
        "importing registry_broken failed: No module named 'a_missing_dependency'" in problems("registry_broken:X")[0]
    )
    assert "importing registry_crash failed: ZeroDivisionError" in problems("registry_crash:X")[0]


def test_a_missing_class_is_answered_with_the_module_s_own_classes() -> None:
    (problem,) = problems("registry_sample:Goood")
    assert "no class 'Goood' (did you mean Good?)" in problem
    assert "Environment" not in problem
    assert "no class 'function'" in problems("registry_sample:function")[0]


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("NoRollout", ["async def rollout"]),
        ("BlockingRollout", ["async def rollout"]),
        ("OnlyDeclared", ["prompts", "async def rollout"]),
    ],
)
def test_a_class_that_lacks_a_method_is_refused(name: str, missing: list[str]) -> None:
    found = problems(f"registry_sample:{name}")
    assert len(found) == len(missing)
    assert all(method in problem for problem, method in zip(found, missing, strict=True))


def test_all_wrong_arguments_are_reported_together() -> None:
    found = problems("registry_sample:Good", {"cuont": 1, "mode": "medium", "limits": ["x"]})
    assert len(found) == 4
    assert "environment.args.cuont: registry_sample:Good has no such argument (did you mean count?)" in found[0]
    assert "it takes count, mode, limits" in found[0]
    assert found[1].startswith("environment.args.mode: ")
    assert "'medium'" in found[1]
    assert found[2].startswith("environment.args.limits: ")
    assert found[3] == "environment.args.count: registry_sample:Good needs this argument"


def test_an_argument_of_a_class_that_takes_none_is_refused() -> None:
    assert "has no such argument; it takes none" in problems("registry_sample:NoArgs", {"x": 1})[0]


def test_what_the_constructor_objects_to_is_passed_on() -> None:
    (problem,) = problems("registry_sample:Good", {"count": -1})
    assert problem == "environment.args: registry_sample:Good: count: at least 0; got -1"


def test_annotations_that_cannot_be_checked_leave_the_value_to_the_constructor() -> None:
    assert vars(make_environment("registry_sample:OddAnnotations", {"lock": "x"})) == {"lock": "x"}
    assert vars(make_environment("registry_sample:CheckersOnly", {"other": [1]})) == {"other": [1]}
    assert vars(make_environment("registry_sample:AnyArgs", {"a": 1})) == {"options": {"a": 1}}


def test_a_missing_package_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    (problem,) = problems("reasoning_gym", {"task": "chain_sum"})
    assert "pip install 'monoloop[envs]'" in problem
