"""The faults of specs in words: fields that are not of the types which their dataclass declares, names in import
strings that lead nowhere, and words that are no names."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from lpq.registry.errors import near_names
from lpq.registry.grammar import NAME, SKIP, meaning
from lpq.registry.showing import brief

ImportString: TypeAlias = Annotated[str, "an import string, as 'package.module:attribute'"]
Positive: TypeAlias = Annotated[float, "a finite number above 0", lambda number: number > 0]
IN_WORDS = {
    str: "a text", int: "a whole number", float: "a finite number", bool: "True or False", NoneType: "None",
    Mapping: "a mapping", Callable: "a function",
}  # fmt: skip
"""The types of values that a spec's author writes, as a remedy says them."""


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of the fields that lpq declares for a spec: a plugin's own subclass may declare others. None for other
    classes."""
    ours = next((c for c in cls.__mro__ if c.__module__.startswith("lpq.registry.")), None)
    return get_type_hints(ours, include_extras=True) if ours is not None else {}


def nested(value: object) -> Iterator[Any]:
    """The dataclass that a value is, or all in a tuple or list, each before the dataclasses in its fields."""
    if isinstance(value, tuple | list):
        for one in value:
            yield from nested(one)
    elif is_dataclass(value) and not isinstance(value, type):
        yield value
        for field in fields(value):
            yield from nested(getattr(value, field.name))


def title(spec: Any) -> str:
    """The kind and the name of a spec in messages: ``format acme``."""
    kind = type(spec).__name__.removesuffix("Spec").lower()
    fields_of = (field for field in ("name", "impl", "title", "quantizer") if hasattr(spec, field))
    name = getattr(spec, next(fields_of, "name"), None)
    return f"{kind} {name}" if isinstance(name, str) else f"a {kind}"


def fault(specs: tuple[Any, ...]) -> tuple[str, str] | None:
    """The first field that is not of its type, of these specs and of those in their fields, and the remedy, in words;
    None: all are of their types."""
    for spec in nested(specs):
        cls: type = type(spec)
        for name, hint in _hints(cls).items():
            value = getattr(spec, name)
            if not _fits(value, hint):
                return f"{title(spec)} has {name}={brief(value)}", f"write {_in_words(hint)}{_named(value, hint)}"
    return None


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(value, inner[0]) and all(holds(value) for holds in inner[2:])
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin in (tuple, Sequence):  # of any length: no spec has another one
        kind = tuple if origin is tuple else tuple | list
        return isinstance(value, kind) and all(_fits(one, inner[0]) for one in value)
    if hint is float:
        return _fits(value, int) or (isinstance(value, float) and math.isfinite(value))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return hint is Any or isinstance(value, origin or hint)


def _in_words(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return str(inner[1])
    if origin in (Union, UnionType):
        return " or ".join(map(_in_words, inner))
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (tuple, Sequence):
        return f"a tuple, as (x,), in which each x is {_in_words(inner[0])}"
    return IN_WORDS.get(origin or hint) or f"a {hint.__name__}"


def _named(value: Any, hint: Any) -> str:
    """A hint at the import string of a class or function that stands in place of one."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    wanted = ImportString in (hint, *get_args(hint)) and None not in (module, name)
    return f" (did you mean '{module}:{name}'?)" if wanted else ""


def meant(error: BaseException | None) -> str:
    """`` (did you mean 'acme.format'?)`` after the error of a module, or of a name in one, that is not there."""
    near = ""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.rpartition(".")[0]
        folders = getattr(sys.modules.get(package), "__path__", ())
        files = [path.stem for folder in folders for path in Path(folder).glob("*")]
        near = near_names(error.name, [f"{package}.{file}" for file in files])
    elif isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        near = near_names(str(error.name), vars(error.obj))
    return f" ({near})" if near else ""


def why_no_name(word: str) -> str | None:
    """Why ``word`` cannot be the name of a format or a recipe; None if it can."""
    if not NAME.fullmatch(word):
        return f"{word!r} is not a name"
    means = "in a rule of a policy it leaves layers alone" if word == SKIP else None
    if (value := meaning(word)) != word:
        means = f"in a quantizer string it means {value}"
    return means and f"{word!r} cannot be a name: {means}"
