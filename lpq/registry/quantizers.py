"""From a quantizer's text to the quantizer, and back.

The registry recognises a quantizer class by its form: it is a dataclass, its fields are the options, and
``from_options`` makes one. So it needs to import neither torch nor ``lpq.core``.
"""

from __future__ import annotations

import dataclasses
import sys
from operator import attrgetter
from typing import Any

from lpq.registry.errors import OptionError, UnknownFormat
from lpq.registry.grammar import Call, Value, parse
from lpq.registry.lookup import at_fault, plugins, quantizer_class
from lpq.registry.registry import cached, cached_few, default
from lpq.registry.showing import brief
from lpq.registry.specs import FormatSpec

KEPT = 1000
"""The most characters of a text whose quantizer is kept: texts of files may be of any length and number."""


def quantizer(text: Any, /, **options: Any) -> Any:
    """Make the quantizer that a text describes.

    Args:
        text: A name, or as much as ``"nvfp4(block=16x16, rht=true)"``. A quantizer is returned itself.
        **options: Options beside the options in the text, as ``block="16x16"``.
    """
    if isinstance(text, str):
        return _quantizer(text, options) if options or len(text) > KEPT else _from_text(text)
    if not hasattr(type(text), "from_options"):
        raise OptionError(f"a quantizer is wanted, or its name or text, not {brief(text)}")
    if options:
        raise OptionError(f"{text} is a quantizer already: change its options with dataclasses.replace")
    return text


@cached_few
def _from_text(text: str) -> Any:
    return _quantizer(text, {})


def _quantizer(text: str, extra: dict[str, Any]) -> Any:
    call = parse(text)
    options = {key: str(value) if isinstance(value, Call) else value for key, value in call.options}
    for key in extra:
        if key in options:
            raise OptionError(f"option {key!r} is given twice: in {brief(text)} and beside it")
    cls, options = quantizer_class(call.name), options | extra
    without_default = [name for name in required(cls) if name not in options]
    try:
        return cls.from_options(**options)
    except OptionError as error:
        if str(error).startswith(f"{cls.__name__}: "):  # users write the format, not its class
            error.args = (call.name + str(error).removeprefix(cls.__name__),)
        if options or without_default:
            raise
        cause = f"format {call.name} refuses its own defaults: {error}"
        raise at_fault(call.name, cause, "give its options defaults that it takes") from error
    except TypeError as error:
        if not without_default:
            raise
        example = ", ".join(f"{name}=…" for name in without_default)
        raise OptionError(f"{call.name} has options without a default: write it as {call.name}({example})") from error


def required(cls: type) -> list[str]:
    """The options of a quantizer class that have no default."""
    nothing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(cls) if f.default is nothing and f.default_factory is nothing]


@cached
def format_of(cls: type) -> FormatSpec:
    """The format of which ``cls`` is the quantizer class."""
    path = f"{cls.__module__}:{cls.__qualname__}"
    for look in (default().loaded, plugins):  # mostly no other plugin is imported to find it
        for spec in (spec for plugin in look() for spec in plugin.formats.values()):
            if spec.quantizer == path or _imported(spec.quantizer) is cls:
                return spec
    raise UnknownFormat(
        f"{path} is the quantizer of no format here: return a FormatSpec(quantizer={path!r}) from "
        f"lpq_register_formats, or to try it without packaging, use lpq.registry.register"
    )


def _imported(string: str) -> Any:
    """The object that an import string names, if its module is imported already; else None."""
    module, _, attribute = string.partition(":")
    try:
        return attrgetter(attribute)(sys.modules.get(module))
    except AttributeError:
        return None


@cached_few
def spec_string(quantizer: Any) -> str:
    """The text that makes this ``quantizer``: its format, and the options that differ from their defaults."""
    return str(_call(quantizer))


def _call(quantizer: Any) -> Call:
    options: list[tuple[str, Value]] = []
    for field in dataclasses.fields(quantizer):
        value = getattr(quantizer, field.name)
        default_value = field.default_factory() if callable(field.default_factory) else field.default
        if _same(value, default_value):
            continue
        options.append((field.name, _call(value) if dataclasses.is_dataclass(value) else value))
    return Call(format_of(type(quantizer)).name, tuple(options))


def _same(value: Any, default_value: Any) -> bool:
    """Whether that is the default. A whole number that is the default of a number is kept as a float."""
    kept_as_float = type(value) is float and type(default_value) is int
    return (type(value) is type(default_value) or kept_as_float) and bool(value == default_value)
