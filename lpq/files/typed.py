"""Values of a file of JSON or TOML, compared with the types that the annotations of a class give them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from lpq.registry.errors import suggestion
from lpq.registry.showing import brief, listed

T = TypeVar("T")
NAMES = {int: "whole number", float: "number", str: "string", bool: "boolean"}
"""The types of plain values as people name them."""
PLAIN: dict[Any, frozenset[type]] = {
    int: frozenset({int}), float: frozenset({int, float}), str: frozenset({str}), bool: frozenset({bool}),
    NoneType: frozenset({NoneType}),
}  # fmt: skip
"""The types that values of a plain type have in a file."""


def typed(kind: type[T], table: Any) -> T:
    """The dataclass of this ``kind`` with the values of a table."""
    hashable: Any = kind
    check_table(table, *_declared(hashable))
    return kind(**table)


@cache
def _declared(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """The types of a dataclass's fields, and the fields that have no default. A file has many lines of one class."""
    return get_type_hints(kind), [f.name for f in fields(kind) if f.default is MISSING]


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
    if kind in PLAIN:
        return type(value) in PLAIN[kind]
    origin, own = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(fits(one, value) for one in own)
    if origin in (tuple, Sequence):
        if not isinstance(value, list):
            return False
        if origin is tuple and own[-1] is not ...:
            return len(value) == len(own) and all(map(fits, own, value))
        if own[0] in PLAIN:  # of thousands of losses
            return PLAIN[own[0]].issuperset(map(type, value))
        return all(fits(own[0], one) for one in value)
    if origin is Literal:
        return value in own
    return isinstance(value, dict)


def _in_words(kind: Any) -> str:
    origin, own = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return " or ".join("left out" if one is NoneType else _in_words(one) for one in own)
    if origin is Literal:
        return " or ".join(map(repr, own))
    if origin is Mapping:
        return "a table"
    return f"a list of {NAMES.get(own[0], 'list')}s" if own else f"a {NAMES[kind]}"
