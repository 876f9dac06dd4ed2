"""The configuration's keys as the structs declare them, and in words what each accepts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from msgspec import Struct
from msgspec.inspect import (
    AnyType,
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


@dataclass(frozen=True)
class Key:
    """One key of the configuration; `owner` is the struct that declares it."""

    path: str
    name: str
    type: Any
    required: bool
    default: Any
    owner: type[Struct]


def section_of(field: msgspec.structs.FieldInfo) -> type[Struct] | None:
    """The struct of a field that is a section; None for a field that holds a value."""
    return field.type if isinstance(field.type, type) and issubclass(field.type, Struct) else None


def keys(struct: type[Struct], prefix: str = "") -> Iterator[Key]:
    """All keys below `struct`, in the order of the structs."""
    for field in msgspec.structs.fields(struct):
        path = f"{prefix}{field.name}"
        section = section_of(field)
        if section is not None:
            yield from keys(section, f"{path}.")
            continue
        default = None if field.required else field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        yield Key(path, field.name, field.type, field.required, default, struct)


def names(struct: type[Struct], prefix: str = "") -> Iterator[str]:
    """The paths of all keys and sections below `struct`."""
    for field in msgspec.structs.fields(struct):
        path = f"{prefix}{field.name}"
        yield path
        section = section_of(field)
        if section is not None:
            yield from names(section, f"{path}.")


def allowed(field_type: Any) -> str:
    """What a field of this type accepts, e.g. "an integer >= 1 or null"."""
    return _words(type_info(field_type))


def words_of(field_type: Any) -> tuple[str, ...]:
    """The words of an enumeration, or those that a text's type gives as examples; () for any other type."""
    info = type_info(field_type)
    if isinstance(info, Metadata):
        schema = cast(dict[str, list[str]], info.extra_json_schema or {})
        return tuple(schema.get("examples", ()))
    return tuple(str(v) for v in info.values) if isinstance(info, LiteralType) else ()


def _words(info: Type) -> str:
    match info:
        case Metadata():
            schema = cast(dict[str, str], info.extra_json_schema or {})
            return schema.get("description") or _words(info.type)
        case UnionType():
            return " or ".join(_words(t) for t in info.types)
        case IntType():
            return f"an integer{_range(info)}"
        case FloatType():
            return f"a number{_range(info)}"
        case LiteralType():
            *others, last = map(str, info.values)
            return f"{', '.join(others)} or {last}" if others else last
        case VarTupleType():
            return f"a list, each {_words(info.item_type)}"
        case TupleType():
            return f"a list of {len(info.item_types)}, each {_words(info.item_types[0])}"
        case DictType():
            return "a mapping of names to values"
        case StrType():
            return "text"
        case BoolType():
            return "true or false"
        case NoneType():
            return "null"
        case AnyType():
            return "any value"
        case _:
            raise TypeError(f"no words for a configuration key of type {info}")


def _range(info: IntType | FloatType) -> str:
    bounds = ((">=", info.ge), (">", info.gt), ("<=", info.le), ("<", info.lt))
    return " and".join(f" {sign} {bound:.10g}" for sign, bound in bounds if bound is not None)
