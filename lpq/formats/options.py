"""Options of a format: the fields of a frozen dataclass, whose values come from a string, a file or a call."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import cached_property
from inspect import getattr_static
from types import NoneType
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from lpq import registry
from lpq.registry.errors import OptionError

VALUES = (bool, int, float, str, NoneType)
"""The types of what an option may be, but for other quantizers: their values are equal where their texts are."""
KINDS = "true or false, a number that is not NaN, a word, none or a quantizer"


class Declared:
    """A property that is computed once for each object, whose options never change. The value then lies in the object,
    where ``torch.compile`` finds a constant: of a property it traces the code, and it cannot trace ``super()`` there.

    ``super().name`` is computed at each call: the object has the value of its own class alone."""

    def __init__(self, name: str, function: Callable[[Any], object]) -> None:
        self.name, self.fget, self.__doc__ = name, function, function.__doc__

    def __get__(self, options: Any, cls: type) -> object:
        if options is None:
            return self
        value = self.fget(options)
        if getattr_static(cls, self.name) is self:
            vars(options)[self.name] = value
        return value


class Options:
    """Fields of a frozen dataclass, checked by their annotations when one is made."""

    declarations: ClassVar[tuple[str, ...]] = ()
    """The attributes that a subclass, or a class beside it, may write as properties and that are computed once."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in cls.declarations:
            attribute = getattr_static(cls, name)
            if isinstance(attribute, property) and attribute.fget is not None:
                setattr(cls, name, Declared(name, attribute.fget))
            elif isinstance(attribute, cached_property):
                setattr(cls, name, Declared(name, attribute.func))

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """The quantizer with these options, which may come from a string, a file or a call."""
        names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in options:
            if name not in names:
                raise OptionError.unknown(registry.format_of(cls).name, name, names)
        return cls(**options).ready()

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, hint = getattr(self, field.name), hints[field.name]
            if not _fits(value, hint):
                raise OptionError.invalid(type(self).__name__, field.name, value, _words(hint))
            if not (isinstance(value, Options) or (type(value) in VALUES and value == value)):
                name = f"{type(self).__name__}: option {field.name!r}"
                raise OptionError(f"{name} is {value!r}; by options quantizers are told apart, so it must be {KINDS}")
            if type(value) in (int, float) and (hint is float or float in get_args(hint)):
                object.__setattr__(self, field.name, float(value) + 0.0)  # 3 and 3.0, or 0.0 and -0.0, are one text

    def ready(self) -> Self:
        """Make all cached lookups now, and return itself."""
        _ = self.text
        return self

    @cached_property
    def text(self) -> str:
        """The string that ``lpq.quantizer`` makes this from."""
        return registry.spec_string(self)

    def __str__(self) -> str:
        return self.text


@registry.cached
def _hints(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except NameError as error:
        raise OptionError(
            f"the annotations of {cls.__module__}.{cls.__qualname__} cannot be read: {error}. Its options are checked "
            "by them: import what they name where the module runs, and not under TYPE_CHECKING"
        ) from error


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return any(value is a or (type(value) is type(a) and value == a) for a in get_args(hint))
    alternatives = get_args(hint)
    if alternatives and not isinstance(hint, type):
        return any(_fits(value, a) for a in alternatives)
    if hint is type(None):
        return value is None
    if hint is int:
        return type(value) is int
    if hint is float:
        return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
    return not isinstance(hint, type) or isinstance(value, hint)


def _words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(repr(a) for a in get_args(hint))
    alternatives = get_args(hint)
    if alternatives:
        return " or ".join(_words(a) for a in alternatives)
    return {type(None): "none", bool: "true or false", int: "a whole number", float: "a number"}.get(hint, "") or str(
        getattr(hint, "__name__", hint)
    )
