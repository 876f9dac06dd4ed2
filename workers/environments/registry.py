"""From a configured name and arguments to an environment object; mistakes in them are found here, before a run starts."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgspec

from workers.environments.base import Environment

BUILTIN: Mapping[str, str] = {
    "agent_process": "workers.environments.agent_process:AgentProcess",
    "reasoning_gym": "workers.environments.reasoning_gym:ReasoningGym",
    "reverse_text": "workers.environments.reverse_text:ReverseText",
}


class BadEnvironment(ValueError):
    """The configured environment cannot be made; `problems` says why, one line each, with the config key in front."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def make_environment(name: str, args: Mapping[str, Any]) -> Environment:
    """The environment `name` (a built-in name or `module:Class`), constructed with the keyword arguments `args`.

    Modules are also looked for in the current directory, as `python -m` does. `args` are JSON-like values; each is checked
    against, and converted to, the constructor's annotation. Raises BadEnvironment. What a module or a constructor raises
    for reasons of its own (a missing package, say) is the cause of it.
    """
    cls = _find_class(name)
    return cast(Environment, _construct(name, cls, args))


def _find_class(name: str) -> type:
    path = BUILTIN.get(name, name)
    module_name, colon, class_name = path.partition(":")
    if not (colon and module_name and class_name):
        nearest = _nearest(name, BUILTIN)
        raise BadEnvironment(
            f"environment.name: there is no environment {name!r}{nearest}; "
            f"built in are {', '.join(BUILTIN)}, and your own is module:Class"
        )
    cwd = str(Path.cwd())
    if cwd not in sys.path:
        sys.path.insert(0, cwd)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise BadEnvironment(f"environment.name: {path}: importing {module_name} failed: {error}") from error
        raise BadEnvironment(
            f"environment.name: {path}: there is no module {error.name!r}, neither installed nor in {cwd}"
        ) from error
    except Exception as error:
        raise BadEnvironment(f"environment.name: {path}: importing {module_name} failed: {error!r}") from error
    cls = getattr(module, class_name, None)
    if not inspect.isclass(cls):
        classes = [
            key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        raise BadEnvironment(
            f"environment.name: {path}: {module_name} has no class {class_name!r}{_nearest(class_name, classes)}; "
            f"its classes are {', '.join(classes) or '(none)'}"
        )
    _check_protocol(path, cls)
    return cls


def _check_protocol(path: str, cls: type) -> None:
    problems: list[str] = []
    if getattr(cls, "prompts", Environment.prompts) is Environment.prompts:
        problems.append(f"environment.name: {path} has no method `prompts(self, seed)`")
    rollout = getattr(cls, "rollout", Environment.rollout)
    if rollout is Environment.rollout or not inspect.iscoroutinefunction(inspect.unwrap(rollout)):
        problems.append(f"environment.name: {path} has no method `async def rollout(self, ctx, prompt)`")
    if problems:
        raise BadEnvironment(*problems)


def _construct(name: str, cls: type, args: Mapping[str, Any]) -> object:
    parameters = inspect.signature(cls).parameters
    named = {
        key: parameter
        for key, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    hints = _annotations(cls)
    problems: list[str] = []
    values: dict[str, Any] = {}
    for key, value in args.items():
        if key not in named and not takes_any:
            problems.append(
                f"environment.args.{key}: {name} has no such argument{_nearest(key, named)}; "
                f"it takes {', '.join(named) or 'none'}"
            )
            continue
        try:
            values[key] = msgspec.convert(value, hints.get(key, Any))
        except TypeError:  # an annotation that msgspec has no rule for; the constructor judges the value itself
            values[key] = value
        except msgspec.ValidationError as error:
            problems.append(f"environment.args.{key}: {error}; got {value!r}")
    problems += [
        f"environment.args.{key}: {name} needs this argument"
        for key, parameter in named.items()
        if parameter.default is parameter.empty and key not in args
    ]
    if problems:
        raise BadEnvironment(*problems)
    try:
        return cls(**values)
    except Exception as error:
        raise BadEnvironment(f"environment.args: {name}: {error or repr(error)}") from error


def _annotations(cls: type) -> Mapping[str, Any]:
    try:
        return get_type_hints(cls.__init__)
    except (AttributeError, NameError, TypeError):  # names that exist for type checkers only
        return {}


def _nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    matches = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(matches)}?)" if matches else ""
