"""What a configuration needs of this machine: the model directory, the environment's code, folders, space, processors."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from controller.config.figures import weight_bytes, weights_folder
from controller.config.model_dir import Fault, ModelFacts
from controller.config.problems import Problem, shown
from controller.config.schema import Config, EnvironmentConfig
from workers.environments.registry import BUILTIN, BadEnvironment, make_environment

_USE = os.R_OK | os.W_OK | os.X_OK

_PACKAGES = {"reasoning_gym": "reasoning_gym"}
"""The package that a built-in environment needs, of those that need one."""
_CLASS_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PLAIN = (
    ast.ClassDef,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Import,
    ast.ImportFrom,
    ast.Expr,
    ast.Assign,
    ast.AnnAssign,
)
"""Statements that define no class in a hidden way."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def model_folder(path: Path, faults: Sequence[Fault]) -> Iterator[Problem]:
    allowed = "a Hugging Face model directory: config.json, *.safetensors, a tokenizer with a chat template"
    kind = kind_of(path)
    if kind == "folder":
        for fault in faults:
            yield Problem(path="model.path", what=f"{path} {fault.what}", allowed=allowed, remedy=fault.remedy)
    elif kind == "missing":
        remedy = f"paths are relative to where you start it: looked for {path.absolute()}"
        if path.name == "quickstart":
            remedy = (
                f"python examples/prepare_quickstart.py {path} makes it, in the project's folder (as `make model` does)"
            )
        elif _HUB_NAME.fullmatch(str(path)):
            remedy = f"models are not downloaded for you: hf download {path} --local-dir {path}"
        yield Problem(path="model.path", what=f"{path} does not exist", allowed=allowed, remedy=remedy)
    else:
        yield Problem(path="model.path", what=f"{path} is not a folder ({kind})", allowed=allowed)


def environment(config: EnvironmentConfig) -> Iterator[Problem]:
    """Is there such an environment? A built-in one is made when that is cheap, so its arguments are checked too; the code
    of others is looked for, not imported: that happens when the run starts."""
    allowed = f"{', '.join(BUILTIN)}, or module:Class"
    package = _PACKAGES.get(config.name)
    if package is not None:
        if _missing_module(package) is not None:
            yield Problem(
                path="environment.name",
                what=f"{config.name} needs the package {package}, which is not installed",
                remedy="pip install 'monoloop[envs]'",
            )
    elif config.name in BUILTIN:
        try:
            make_environment(config.name, config.args)
        except BadEnvironment as error:
            for problem in error.problems:
                path, _, what = problem.partition(": ")
                yield Problem(path=path, what=what)
    elif _CLASS_NAME.fullmatch(config.name) is None:
        yield Problem(
            path="environment.name",
            what=f"{shown(config.name)} is not known",
            allowed=allowed,
            nearest=next(iter(get_close_matches(config.name, list(BUILTIN), n=1)), None),
        )
    else:
        yield from own_class("environment.name", config.name, allowed)


def own_class(path: str, value: str, allowed: str) -> Iterator[Problem]:
    """Is there such a `module:Class`? It is looked for, not imported."""
    module, _, name = value.partition(":")
    missing = _missing_module(module)
    if missing is not None:
        yield Problem(
            path=path,
            what=f"{shown(value)}: there is no module {missing}, neither installed nor in {Path.cwd()}",
            allowed=allowed,
            remedy="start it from the folder that holds the module, or put that folder on PYTHONPATH",
        )
        return
    names = _names(module)
    if names is not None and name not in names:
        classes = sorted(name for name, is_class in names.items() if is_class)
        yield Problem(
            path=path,
            what=f"{shown(value)}: {module} defines no class {name}",
            allowed=f"one of its classes: {', '.join(classes) or '(none)'}",
            nearest=next(iter(get_close_matches(name, sorted(names), n=1)), None),
        )


def folders(config: Config, model: ModelFacts | None) -> Iterator[Problem]:
    """Can the run write where it must, and is there space?"""
    run_dir = Path(config.run.dir)
    nearest = next(p for p in (run_dir.absolute(), *run_dir.absolute().parents) if kind_of(p) != "missing")
    if kind_of(nearest) != "folder" or not os.access(nearest, _USE):
        what = "cannot be written to" if kind_of(nearest) == "folder" else f"is not a folder ({kind_of(nearest)})"
        yield Problem(path="run.dir", what=f"{run_dir}: {nearest} {what}", allowed="a folder, or where one can be made")
    elif model is not None:
        # Trainer's state: the model, and two moments in float32. A new checkpoint is complete before an old one goes.
        needed = (config.checkpoint.keep + 1) * (weight_bytes(config.model, model) + 8 * model.parameters)
        free = shutil.disk_usage(nearest).free
        if free < needed:
            yield Problem(
                path="run.dir",
                what=f"{_gib(free)} free at {nearest}; {config.checkpoint.keep} + 1 checkpoints take about {_gib(needed)}",
                remedy="free space, choose another run.dir, or lower checkpoint.keep",
                warning=True,
            )
    if config.weight_sync.transport not in ("file", "gloo"):
        return
    weights = weights_folder(config)
    if kind_of(weights) != "folder" or not os.access(weights, _USE):
        yield Problem(
            path="weight_sync.dir",
            what=f"{weights} is not a folder that can be written to ({kind_of(weights)})",
            allowed="a folder that exists, seen by trainer and engines, or null",
        )
    elif model is not None:
        needed, free = 2 * weight_bytes(config.model, model), shutil.disk_usage(weights).free
        if free < needed:
            yield Problem(
                path="weight_sync.dir",
                what=f"{_gib(free)} free in {weights}, and two versions of the weights take {_gib(needed)}",
                allowed="a folder with room for the version that is served and the next one",
                remedy="name another folder; in a container, give it more shared memory (--shm-size)",
            )


def machine(config: Config) -> Iterator[Problem]:
    generation, training = config.generation, config.training
    threads = training.threads if training.device == "cpu" else 0
    if generation.device == "cpu":
        threads += generation.workers * generation.threads
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads > processors:
        yield Problem(
            path="generation.threads",
            what=(
                f"{generation.workers} x {generation.threads} generation threads and {training.threads} training threads "
                f"compute on {processors} processors: they will spin against each other"
            ),
            allowed="generation.workers * generation.threads + training.threads <= processors, of those on cpu",
            warning=True,
        )


def kind_of(path: Path) -> str:
    """ "folder", "missing", or what else is there."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except (OSError, ValueError) as e:
        return str(getattr(e, "strerror", None) or e)
    return "folder" if stat.S_ISDIR(mode) else "a file"


def _missing_module(name: str) -> str | None:
    """The first part of a dotted name that there is no module for; None when all are found. Imports nothing."""
    found = _find_module(name)
    return found if isinstance(found, str) else None


def _find_module(name: str) -> importlib.machinery.ModuleSpec | str | None:
    """The module's spec; the first part of the name that is missing; None for a module that was made by hand."""
    parts = name.split(".")
    try:
        # As the run will: in the current folder too, which `python -m` searches and an installed script does not.
        spec = importlib.util.find_spec(parts[0]) or importlib.machinery.PathFinder.find_spec(
            parts[0], [str(Path.cwd())]
        )
    except ValueError:
        return None
    for depth, _ in enumerate(parts, 1):
        if spec is None:
            return ".".join(parts[:depth])
        if depth < len(parts):
            inner = ".".join(parts[: depth + 1])
            spec = importlib.machinery.PathFinder.find_spec(inner, spec.submodule_search_locations or [])
    return spec


def _names(module: str) -> dict[str, bool] | None:
    """The module's names that could be classes, and whether they surely are: those that it defines, rather than imports or
    assigns. None when that cannot be told without running it."""
    spec = _find_module(module)
    if not isinstance(spec, importlib.machinery.ModuleSpec) or not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    if any(not isinstance(node, _PLAIN) for node in tree.body):
        return None
    names: dict[str, bool] = {}
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                names[name] = True
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name: False for alias in aliases}
            case ast.Assign(targets=targets):
                names |= {target.id: False for target in targets if isinstance(target, ast.Name)}
            case _:
                pass
    return None if "*" in names else names


def _gib(size: int) -> str:
    return f"{size / 2**30:.2g} GiB"
