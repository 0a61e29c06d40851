"""Values of a file of JSON or TOML, compared with the types that the annotations of a class give them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from lpq.registry.errors import suggestion
from lpq.registry.showing import brief, listed

T = TypeVar("T")
NAMES = {int: "whole number", float: "number", str: "string", bool: "boolean"}
"""The types of plain values as people name them."""


def typed(kind: type[T], table: Any) -> T:
    """The dataclass of this ``kind`` with the values of a table."""
    own: Any = kind  # a dataclass
    check_table(table, get_type_hints(kind), [f.name for f in fields(own) if f.default is MISSING])
    return kind(**table)


def check_table(table: object, kinds: Mapping[str, Any], needed: Collection[str] = (), *, others: bool = False) -> None:
    """Raise a ``ValueError`` that says which name of a table is missing or is none, or which value has another type.
    ``others``: whether it may have other names."""
    if not isinstance(table, dict):
        raise ValueError(f"{brief(table)} is no table of names and values")
    if absent := [name for name in needed if name not in table]:
        raise ValueError(f"it lacks {listed(absent)}")
    for name, value in table.items():
        if name not in kinds and not others:
            raise ValueError(f"nothing is named {brief(name)}: {suggestion(name, kinds)}")
        if name in kinds and not fits(kinds[name], value):
            raise ValueError(f"{name} = {brief(value)} must be {_in_words(kinds[name])}")


def fits(kind: Any, value: object) -> bool:
    """Whether a file's value is of a type. A whole number is a number, and tuples and sequences are lists."""
    origin, own = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(fits(one, value) for one in own)
    if origin in (tuple, Sequence):
        if not isinstance(value, list):
            return False
        kinds = own[:1] * len(value) if origin is Sequence or own[-1] is ... else own
        return len(value) == len(kinds) and all(map(fits, kinds, value))
    if origin is Literal:
        return value in own
    if origin is Mapping:
        return isinstance(value, dict)
    return type(value) in ((int, float) if kind is float else (kind,))


def _in_words(kind: Any) -> str:
    origin, own = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return " or ".join("left out" if one is NoneType else _in_words(one) for one in own)
    if origin is Literal:
        return " or ".join(map(repr, own))
    if origin is Mapping:
        return "a table"
    return f"a list of {NAMES.get(own[0], 'list')}s" if own else f"a {NAMES[kind]}"
