"""From a quantizer's text to the quantizer, and back.

The registry knows a quantizer class by what it must have: it is a dataclass, its fields are the options, and
``from_options`` makes one. So it needs to import neither torch nor ``lpq.core``.
"""

from __future__ import annotations

import dataclasses
import sys
from operator import attrgetter
from typing import Any

from lpq.registry.errors import OptionError, UnknownFormat
from lpq.registry.grammar import Call, Value, parse
from lpq.registry.lookup import cached, default
from lpq.registry.specs import FormatSpec


def quantizer(text: Any, /, **options: Any) -> Any:
    """The quantizer that a text describes: a name, or as much as ``"nvfp4(block=16x16, rht=true)"``.

    ``options`` add to those in the text. A quantizer is returned as it is.
    """
    if isinstance(text, str):
        return _quantizer(text, options) if options else _from_text(text)
    if not hasattr(type(text), "from_options"):
        raise OptionError(f"a quantizer is wanted, or its name or text, not {text!r}")
    if options:
        raise OptionError(f"{text} is a quantizer already: change its options with dataclasses.replace")
    return text


@cached
def _from_text(text: str) -> Any:
    return _quantizer(text, {})


def _quantizer(text: str, extra: dict[str, Any]) -> Any:
    call = parse(text)
    options = {key: str(value) if isinstance(value, Call) else value for key, value in call.options}
    for key in extra:
        if key in options:
            raise OptionError(f"option {key!r} is given twice: in {text!r} and beside it")
    return default().load_class(call.name, "quantizer").from_options(**options, **extra)


@cached
def format_of(cls: type) -> FormatSpec:
    """The format of which ``cls`` is the quantizer class."""
    loaded = default().loaded_as(cls)
    if loaded is not None:
        return loaded  # and no other plugin is imported to find it
    path = f"{cls.__module__}:{cls.__qualname__}"
    for spec in default().formats().values():
        if spec.quantizer == path or _imported(spec.quantizer) is cls:
            return spec
    raise UnknownFormat(
        f"{path} is the quantizer of no format here: return a FormatSpec(quantizer={path!r}) from "
        f"lpq_register_formats, or to try it without packaging, use lpq.registry.register"
    )


def _imported(string: str) -> Any:
    """What an import string names, if its module is imported already; else None."""
    module, _, attribute = string.partition(":")
    try:
        return attrgetter(attribute)(sys.modules.get(module))
    except AttributeError:
        return None


@cached
def spec_string(quantizer: Any) -> str:
    """The text that makes this quantizer: its format, and the options that differ from their defaults."""
    return str(_call(quantizer))


def _call(quantizer: Any) -> Call:
    options: list[tuple[str, Value]] = []
    for field in dataclasses.fields(quantizer):
        value = getattr(quantizer, field.name)
        default_value = field.default_factory() if callable(field.default_factory) else field.default
        if type(value) is type(default_value) and value == default_value:
            continue
        options.append((field.name, _call(value) if dataclasses.is_dataclass(value) else value))
    return Call(format_of(type(quantizer)).name, tuple(options))
