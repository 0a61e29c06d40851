"""The quantizers of a format that the kit tests, from the type hints of its options.

A ``Literal`` or a ``bool`` gives its values, and a field that is a quantizer gives the other built-in formats. Any
other option keeps its default. Up to ``ALL`` combinations are all taken; of more, enough for every two values of two
options to meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from lpq import registry
from lpq.formats import Quantizer
from lpq.registry.errors import OptionError
from lpq.registry.quantizers import required

ALL = 8
SEARCHED = 4096
STATIC = "static"
"""The option that the core gives a meaning: the tests of static statistics set it, and the others leave it alone."""
ONLY = "lpq_only"

Test = TypeVar("Test", bound=Callable[..., None])


@dataclass(frozen=True)
class Family:
    """One format, as it was given to the kit, and its quantizers that are tested."""

    name: str
    quantizers: tuple[Quantizer, ...]

    @property
    def default(self) -> Quantizer:
        """The quantizer with the default options, or the given one."""
        return self.quantizers[0]

    def __str__(self) -> str:
        return self.name


def family(text: str) -> Family:
    """``nvfp4``: the format with all its options. ``nvfp4(block=16x16)``: this quantizer alone."""
    if "(" in text:
        return Family(text, (registry.quantizer(text),))
    return _family(text)


def nearby(name: str) -> Iterator[Quantizer]:
    """A format's quantizer with the default options, then those that differ from it in one option."""
    yield registry.quantizer(name)
    for option, (_, *others) in _options(name).items():
        for value in others:
            with contextlib.suppress(OptionError):  # it needs another option as well
                yield registry.quantizer(name, **{option: value})


def with_other_numbers(quantizer: Quantizer) -> Iterator[Quantizer]:
    """The quantizers that differ from this one in an option that is a number, as far as the format takes them."""
    for field in dataclasses.fields(quantizer):  # type: ignore[arg-type]
        number = getattr(quantizer, field.name)
        for other in (2 * number, number + 1) if type(number) in (int, float) else ():
            with contextlib.suppress(Exception):
                yield dataclasses.replace(quantizer, **{field.name: other}).ready()  # type: ignore[type-var]


def _options(name: str) -> dict[str, list[Any]]:
    """The options of a format with the values of each, the default first."""
    cls = registry.quantizer_class(name)
    hints = get_type_hints(cls)
    return {f.name: _values(name, f, hints[f.name]) for f in dataclasses.fields(cls) if f.name != STATIC}


@registry.cached
def _family(name: str) -> Family:
    options = _options(name)
    if not required(registry.quantizer_class(name)):
        registry.quantizer(name)  # defaults that are refused are no combination to leave out
    product = itertools.islice(itertools.product(*options.values()), SEARCHED)
    valid: dict[Quantizer, tuple[Any, ...]] = {}
    refusal: OptionError | None = None
    for values in product:
        try:
            quantizer = registry.quantizer(name, **dict(zip(options, values, strict=True)))
        except OptionError as error:  # these options do not go together
            refusal = refusal or error
            continue
        valid.setdefault(quantizer, values)
    if not valid:
        raise refusal or OptionError(f"{name}: no options to test it with")
    quantizers = list(valid) if len(valid) <= ALL else _pairwise(valid)
    return Family(name, tuple(quantizers))


def _values(name: str, field: dataclasses.Field[Any], hint: Any) -> list[Any]:
    """The values of an option, the default first."""
    default: list[Any] = []
    if field.default_factory is not dataclasses.MISSING:
        default = [field.default_factory()]
    elif field.default is not dataclasses.MISSING:
        default = [field.default]
    values = [*default, *(v for v in _alternatives(name, hint) if v not in default)]
    if not values:
        raise OptionError(
            f"option {field.name!r} of {name} has no default and no list of values: name the quantizer in "
            f"full, as '{name}({field.name}=…)'"
        )
    return values


def _alternatives(name: str, hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif hint is bool:
        yield from (False, True)
    elif isinstance(hint, type) and issubclass(hint, Quantizer):
        yield from (registry.quantizer(other) for other in partners() if other != name)
    elif not isinstance(hint, type) and hint is not NoneType:
        for part in get_args(hint):
            yield from _alternatives(name, part)


@registry.cached
def partners() -> tuple[str, ...]:
    """The built-in formats that need no option. A tested format is combined with these alone: faults of another format
    that happens to be installed are not its own."""
    names = []
    for name in (name for plugin in registry.plugins() if plugin.builtin for name in plugin.formats):
        with contextlib.suppress(OptionError):  # it needs an option
            registry.quantizer(name)
            names.append(name)
    return tuple(names)


def _pairwise(valid: dict[Quantizer, tuple[Any, ...]]) -> list[Quantizer]:
    """Some of these combinations, the first among them, in which all pairs of values occur."""
    pairs = {quantizer: set(itertools.combinations(enumerate(values), 2)) for quantizer, values in valid.items()}
    first = next(iter(valid))
    quantizers, pairs_to_meet = [first], set().union(*pairs.values()) - pairs[first]
    while pairs_to_meet:
        best = max(pairs, key=lambda quantizer: len(pairs[quantizer] & pairs_to_meet))
        quantizers.append(best)
        pairs_to_meet -= pairs[best]
    return quantizers


def only(predicate: Callable[[Quantizer], bool], words: str) -> Callable[[Test], Test]:
    """A test that is about some quantizers only; ``words`` describe them, as in "rounds stochastically"."""

    def mark(test: Test) -> Test:
        setattr(test, ONLY, (predicate, words))
        return test

    return mark


def known_failures(quantizer: Quantizer) -> dict[str, str]:
    """The tests that a format declares it fails: ``known_failures`` of its quantizer, the name of a test to the reason.

    ``test_name`` is the whole test, ``test_name[case]`` one of its ``cases``. It is read from the quantizer, not from
    its class: a property gives what holds for these options. Such a test must fail: once it passes, the kit fails until
    it is off the list.
    """
    return getattr(quantizer, "known_failures", {})


def cases(test: Callable[..., Any]) -> list[str]:
    """The cases that a known failure may name in brackets, as pytest names the values of a test's own parameters."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    names = [list(partners())] if "partner" in inspect.signature(test).parameters else []
    for mark in marks:
        ids = mark.kwargs.get("ids", str)
        names.append([ids(value) for value in mark.args[1]] if callable(ids) else list(ids))
    return ["-".join(case) for case in itertools.product(*names)] if names else []
