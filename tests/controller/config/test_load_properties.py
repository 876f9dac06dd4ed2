"""Whatever the input, loading gives a Config or a ConfigError; a valid configuration comes back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.inspect import (
    BoolType,
    DictType,
    FloatType,
    IntType,
    LiteralType,
    Metadata,
    NoneType,
    StrType,
    TupleType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

from controller.config.checks import check_config
from controller.config.describe import keys
from controller.config.load import check_values, load_config
from controller.config.problems import ConfigError
from controller.config.schema import Config

PRINTABLE = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=8)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | PRINTABLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PRINTABLE, inner, max_size=3),
    max_leaves=6,
)
PATHS = [key.path for key in keys(Config)]
SECTIONS = sorted({path.rpartition(".")[0] for path in PATHS})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "run.yaml"


def values_of(info: Type) -> st.SearchStrategy[Any]:
    """Values that a field of this type accepts."""
    match info:
        case Metadata():
            if isinstance(info.type, StrType) and info.type.pattern:
                return st.from_regex(info.type.pattern, fullmatch=True).filter(str.isprintable)
            return values_of(info.type)
        case UnionType():
            return st.one_of(map(values_of, info.types))
        case NoneType():
            return st.none()
        case BoolType():
            return st.booleans()
        case IntType():
            low, high = info.ge if info.ge is not None else -1000, info.le or (info.lt - 1 if info.lt else 10**6)
            return st.integers(low, high)
        case FloatType():
            low, high = info.ge if info.ge is not None else info.gt, info.le if info.le is not None else info.lt
            return st.floats(
                low,
                high if high is not None else 1e300,
                exclude_min=info.gt is not None,
                exclude_max=info.lt is not None,
                allow_subnormal=False,
            )
        case StrType():
            return PRINTABLE.filter(bool)
        case LiteralType():
            return st.sampled_from(info.values)
        case TupleType():
            return st.tuples(*map(values_of, info.item_types))
        case VarTupleType():
            return st.lists(values_of(info.item_type), max_size=3).map(tuple)
        case DictType():
            finite = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | PRINTABLE
            return st.dictionaries(PRINTABLE, finite | st.floats(allow_nan=False, allow_infinity=False), max_size=3)
        case _:
            raise TypeError(info)


def loaded(file: Path, overrides: list[str]) -> Config | None:
    """None after a ConfigError that says something; any other exception fails the test."""
    try:
        return load_config(file, overrides)
    except ConfigError as error:
        if not error.problems or not all(str(p).strip() for p in error.problems):
            raise AssertionError("an error without a message") from error
        return None


VALID = st.fixed_dictionaries({key.path: values_of(type_info(key.type)) for key in keys(Config)})


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


@given(VALID)
@settings(max_examples=60, deadline=None)
def test_a_valid_config_round_trips_through_a_file(file: Path, flat: dict[str, Any]) -> None:
    expected = msgspec.convert(nested(flat), Config)
    file.write_text(json.dumps(nested(flat), ensure_ascii=False), encoding="utf-8")
    assert load_config(file) == expected
    assert check_values(expected) == []


@given(VALID, st.data())
@settings(max_examples=100, deadline=None)
def test_a_mutated_config_gives_a_config_or_a_config_error(
    file: Path, flat: dict[str, Any], data: st.DataObject
) -> None:
    tree = nested(flat)
    for path in data.draw(st.lists(st.sampled_from(PATHS + SECTIONS), min_size=1, max_size=4)):
        *sections, name = path.split(".")
        node: Any = tree
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            continue
        match data.draw(st.sampled_from(["set", "delete", "add"])):
            case "set":
                node[name] = data.draw(ANYTHING)
            case "delete":
                node.pop(name, None)
            case _:
                node[data.draw(PRINTABLE)] = data.draw(ANYTHING)
    file.write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")
    override = st.sampled_from([*PATHS, "", "a..b", "x"]).map(lambda p: f"{p}=") | PRINTABLE
    config = loaded(file, data.draw(st.lists(override, max_size=2)))
    if config is not None:
        check_config(config)


@given(st.binary(max_size=200) | st.text("{}[]:,#&*!|>'\"-?%@` \n\tab01.e\\~", max_size=80).map(str.encode))
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("suffix", [".yaml", ".toml"])
def test_any_bytes_give_a_config_error(file: Path, suffix: str, content: bytes) -> None:
    path = file.with_suffix(suffix)
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_config(path)


@given(st.sampled_from(PATHS), st.text("{}[]:,#&*!|>'\"-?%@` \n\tab01.e\\~", max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_override_gives_a_config_or_a_config_error(file: Path, path: str, text: str) -> None:
    file.write_text("run: {dir: a, steps: 1}\nmodel: {path: b}\nenvironment: {name: reverse_text}\n")
    loaded(file, [f"{path}={text}"])
