"""Loads a configuration, and reports everything that is wrong with its keys and values in one pass."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct

from controller.config.describe import allowed, names, section_of, words_of
from controller.config.document import Document, KeyPath, parse_value, read_document, resolve
from controller.config.problems import ConfigError, Problem, shown
from controller.config.schema import Config

S = TypeVar("S", bound=Struct)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML or TOML file, apply overrides `a.b=value` in order, and check every key, type and range.

    An override's value is YAML or JSON and replaces what the file has at that path. A section left empty has its defaults.
    Raises ConfigError with all problems. What holds between keys is for `checks.check_config`.
    """
    document = read_document(Path(path))
    for override in overrides:
        _apply(override, document)
    walk = _Walk(document)
    config = walk.section(Config, document.data, ())
    if document.problems or config is None:
        raise ConfigError(document.problems)
    return config


def check_values(config: Config) -> list[Problem]:
    """The problems of a Config that was built in code: its constructors check neither types nor ranges."""
    try:
        document = Document(data=msgspec.to_builtins(config))
    except TypeError as e:
        return [Problem(path="environment.args", what=str(e), allowed="numbers, text, lists and mappings of them")]
    _Walk(document).section(Config, document.data, ())
    return document.problems


def _apply(override: str, document: Document) -> None:
    source = f"--set {override}"
    dotted, equals, text = override.partition("=")
    path = tuple(dotted.split("."))
    if not equals or not all(path):
        what = "is not an override"
        document.problems.append(
            Problem(path=dotted or override, what=what, allowed="section.key=value", source=source)
        )
        return
    try:
        value = parse_value(text, source)
    except ConfigError as e:
        document.problems += (msgspec.structs.replace(p, path=dotted, source=source) for p in e.problems)
        return
    values = document.data
    for depth, name in enumerate(path[:-1], 1):
        inner = values.get(name)
        if inner is None:
            inner = values[name] = {}
        if not isinstance(inner, dict):
            what = f"is {shown(inner)}, so it has no key {path[depth]}"
            document.problems.append(Problem(path=".".join(path[:depth]), what=what, source=source))
            return
        values = cast(dict[str, Any], inner)
    values[path[-1]] = value
    document.sources = {p: s for p, s in document.sources.items() if p[: len(path)] != path}
    document.sources[path] = source


class _Walk:
    """Walks the structs beside the values; collects the problems in the document."""

    def __init__(self, document: Document) -> None:
        self._document = document

    def section(self, struct: type[S], value: Any, path: KeyPath) -> S | None:
        """The struct of these values, or None when something in them is wrong."""
        if value is None:
            value = {}
        fields = {field.name: field for field in msgspec.structs.fields(struct)}
        if not isinstance(value, dict):
            return self._add(path, f"{shown(value)} is not a section", allowed=f"the keys {', '.join(fields)}")
        values = cast(dict[str, Any], value)
        before = len(self._document.problems)
        for name in values:
            if name not in fields:
                self._unknown((*path, name), list(fields))
        arguments: dict[str, Any] = {}
        for name, field in fields.items():
            here = (*path, name)
            inner = section_of(field)
            if inner is not None and (name in values or field.required):
                arguments[name] = self.section(inner, values.get(name), here)
            elif name in values:
                arguments[name] = self._leaf(field.type, values[name], here)
            elif field.required:
                self._add(here, "is missing", allowed=allowed(field.type))
        return struct(**arguments) if len(self._document.problems) == before else None

    def _leaf(self, field_type: Any, value: Any, path: KeyPath) -> Any:
        flaws = list(_flaws(value, path))
        for where, what in flaws:
            self._add(where, what, allowed=allowed(field_type) if where == path else "")
        if flaws:
            return None
        if value is None and _converts({}, field_type):
            value = {}
        if _converts(value, field_type):
            return msgspec.convert(value, field_type)
        meant = next((v for v in _meant(value) if _converts(v, field_type)), None)
        return self._add(
            path,
            f"{shown(value)} is not allowed",
            allowed=allowed(field_type),
            nearest=_nearest(str(value), words_of(field_type)),
            remedy="" if meant is None else f"write {shown(meant)}",
        )

    def _unknown(self, path: KeyPath, known: list[str]) -> None:
        nearest = _nearest(path[-1], known)
        if nearest is not None:
            nearest = ".".join((*path[:-1], nearest))
        else:  # right name, wrong section?
            elsewhere = {p.rpartition(".")[2]: p for p in names(Config)}
            match = _nearest(path[-1], list(elsewhere), cutoff=0.85)
            nearest = elsewhere[match] if match is not None else None
        self._add(path, "unknown key", allowed=", ".join(known), nearest=nearest)

    def _add(self, path: KeyPath, what: str, *, allowed: str, nearest: str | None = None, remedy: str = "") -> None:
        self._document.problems.append(
            Problem(
                path=".".join(path),
                what=what,
                allowed=allowed,
                nearest=nearest,
                remedy=remedy,
                source=self._document.source(path),
            )
        )


def _converts(value: Any, field_type: Any) -> bool:
    try:
        msgspec.convert(value, field_type)
    except msgspec.ValidationError:
        return False
    return True


def _flaws(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """What no value of a configuration may contain, at any depth: where, and what."""
    if isinstance(value, dict):
        for name, inner in cast(dict[str, Any], value).items():
            yield from _flaws(name, path)
            yield from _flaws(inner, (*path, name))
        return
    if isinstance(value, list | tuple):
        for i, inner in enumerate(cast(Sequence[Any], value)):
            yield from _flaws(inner, (*path, str(i)))
        return
    flaw = ""
    if isinstance(value, str):
        if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
            flaw = "text must not have NUL characters or lone surrogates"
    elif isinstance(value, float):
        if not math.isfinite(value):
            flaw = "a number must be finite"
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            flaw = "an integer must fit in 64 bits"
    elif value is not None:
        flaw = f"a {type(value).__name__} has no place in a configuration; write it as text"
    if flaw:
        yield path, f"{shown(value)} is not allowed: {flaw}"


def _meant(value: Any) -> Iterator[Any]:
    """What a value of the wrong type may have been meant to be."""
    if isinstance(value, str):
        yield resolve(value.replace("_", ""))
        if value.lower() in ("yes", "on", "no", "off"):
            yield value.lower() in ("yes", "on")
    elif isinstance(value, float) and value.is_integer():
        yield int(value)
    elif isinstance(value, bool | int | float):
        yield str(value)
    yield [value]


def _nearest(name: str, known: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)
