"""Reads a configuration file into plain values and remembers the line of each.

YAML is read by the 1.2 core schema: `1e-6` is a number, `on`, `off`, `yes` and `no` are text, `010` is ten. What a
configuration has no need of is refused with its line: anchors, tags, several documents, keys given twice. The file is
untrusted: at most 1 MiB and 32 levels deep.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from controller.config.problems import ConfigError, Problem, shown

MAX_BYTES = 1 << 20
_MAX_DEPTH = 32

KeyPath = tuple[str, ...]

# YAML 1.2.2, section 10.3.2. An integer of more digits is read as a float.
_RESOLVERS: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    (re.compile(r"(~|null|Null|NULL|)"), lambda _: None),
    (re.compile(r"(true|True|TRUE|false|False|FALSE)"), lambda s: s.lower() == "true"),
    (re.compile(r"[-+]?[0-9]{1,300}"), int),
    (re.compile(r"0o[0-7]{1,300}"), lambda s: int(s, 8)),
    (re.compile(r"0x[0-9a-fA-F]{1,300}"), lambda s: int(s, 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda s: float(s.replace(".", ""))),
)


@dataclass
class Document:
    """Plain values (null, booleans, numbers, text, lists, mappings with text keys) and where each was written."""

    data: dict[str, Any] = field(default_factory=dict[str, Any])
    sources: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    """E.g. "run.yaml line 12"; for a path without an entry, that of the nearest enclosing one."""
    problems: list[Problem] = field(default_factory=list[Problem])
    """Keys given twice. (Whatever else is wrong with a file makes the rest unreadable, and raises.)"""

    def source(self, path: KeyPath) -> str:
        while path and path not in self.sources:
            path = path[:-1]
        return self.sources.get(path, "")


def read_document(path: Path) -> Document:
    """Read a file; `.toml` is TOML, anything else YAML (and so JSON). Raises ConfigError with one problem."""
    text = _read_text(path)
    document = _parse_toml(text, str(path)) if path.suffix == ".toml" else _parse_yaml(text, str(path))
    if not document.data:
        raise _unreadable(
            str(path),
            "the file is empty",
            remedy="a configuration has at least the sections run, model and environment",
        )
    return document


def parse_value(text: str, source: str) -> Any:
    """One YAML or JSON value, as on the command line. Raises ConfigError with one problem."""
    builder = _YamlBuilder(source)
    value = builder.build(text)
    if builder.document.problems:
        raise ConfigError(builder.document.problems)
    return value


def resolve(text: str) -> Any:
    """What an unquoted YAML scalar stands for."""
    for pattern, convert in _RESOLVERS:
        if pattern.fullmatch(text):
            return convert(text)
    return text


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _unreadable(str(path), "no such file", remedy=f"looked for {path.absolute()}") from None
    except IsADirectoryError:
        raise _unreadable(str(path), "is a folder, not a file", remedy="name the YAML or TOML file itself") from None
    except (OSError, ValueError) as e:
        raise _unreadable(str(path), f"cannot be read: {getattr(e, 'strerror', None) or e}") from None
    if len(content) > MAX_BYTES:
        raise _unreadable(
            str(path), "is larger than 1 MiB", remedy="is it the right file? A configuration is a few kilobytes"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = content.count(b"\n", 0, e.start) + 1
        raise _unreadable(f"{path} line {line}", f"is not UTF-8: byte 0x{content[e.start]:02x} at {e.start}") from None


def _unreadable(source: str, what: str, *, remedy: str = "") -> ConfigError:
    return ConfigError([Problem(path="", what=what, remedy=remedy, source=source)])


def _parse_toml(text: str, name: str) -> Document:
    try:
        return Document(data=tomllib.loads(text), sources={(): name})
    except RecursionError:
        raise _unreadable(name, "is nested too deeply") from None
    except ValueError as e:  # TOMLDecodeError, or a number that Python will not read
        raise _unreadable(name, f"is not TOML: {e}") from None


def _parse_yaml(text: str, name: str) -> Document:
    builder = _YamlBuilder(name)
    data = builder.build(text)
    if data is not None and not isinstance(data, dict):
        raise _unreadable(name, f"the file holds {shown(data)}", remedy="write sections at the top, e.g. `run:`")
    builder.document.data = data or {}
    builder.document.sources[()] = name
    return builder.document


class _YamlBuilder:
    """Builds plain values from PyYAML's events, which know lines, quotes, and what was written in full."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.document = Document()

    def build(self, text: str) -> Any:
        try:
            events = cast(Iterator[yaml.Event], yaml.parse(text, Loader=yaml.SafeLoader))
            next(events)  # stream start
            if isinstance(next(events), yaml.StreamEndEvent):
                return None
            value = self._node(next(events), events, ())
            next(events)  # document end
            after = next(events)
            if not isinstance(after, yaml.StreamEndEvent):
                raise self._refused(after, "a second document begins here (---)")
            return value
        except yaml.MarkedYAMLError as e:
            mark = e.problem_mark or e.context_mark
            where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            what = ", ".join(part for part in (e.context, e.problem) if part)
            raise _unreadable(f"{self._name}{where}", f"is not YAML: {what}") from None
        except (yaml.YAMLError, ValueError, OverflowError) as e:  # characters YAML does not have
            raise _unreadable(self._name, f"is not YAML: {' '.join(str(e).split())}") from None

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event], path: KeyPath) -> Any:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise self._refused(event, "anchors and aliases (& and *) are not supported", "write the values out")
        if getattr(event, "tag", None) is not None:
            raise self._refused(event, "tags (!) are not supported", "write the plain value")
        if len(path) > _MAX_DEPTH:
            raise self._refused(event, f"is nested more than {_MAX_DEPTH} deep")
        self.document.sources.setdefault(path, self._source(event))
        if isinstance(event, yaml.ScalarEvent):
            return resolve(event.value) if event.style is None else event.value
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                items.append(self._node(event, events, (*path, str(len(items)))))
            return items
        return self._mapping(events, path)

    def _mapping(self, events: Iterator[yaml.Event], path: KeyPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent) or event.tag is not None or event.anchor is not None:
                raise self._refused(event, "a key must be plain text")
            key = event.value
            if key in mapping:
                self.document.problems.append(
                    Problem(
                        path=".".join((*path, key)),
                        what="is given twice",
                        remedy=f"remove one; the other is at {self.document.source((*path, key))}",
                        source=self._source(event),
                    )
                )
            else:
                self.document.sources[(*path, key)] = self._source(event)
            mapping[key] = self._node(next(events), events, (*path, key))
        return mapping

    def _source(self, event: yaml.Event) -> str:
        mark = event.start_mark
        return f"{self._name} line {mark.line + 1}" if mark else self._name

    def _refused(self, event: yaml.Event, what: str, remedy: str = "") -> ConfigError:
        return _unreadable(self._source(event), what, remedy=remedy)
