"""The errors that lpq raises on purpose. Each message states what is wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Self

from lpq.registry.showing import brief, printable

LINE = 200
"""The maximal number of characters of a text in which a place is marked, and of a name that is compared with others."""

ALIKE = 0.1
"""The difference between two names' similarities to a third (0 to 1) up to which either may have been meant."""


class LpqError(Exception):
    """The base class of all errors of lpq. Its text never controls a terminal, whatever file or package it names."""

    def __str__(self) -> str:
        return printable(self.message())

    def message(self) -> str:
        """The message."""
        return super().__str__()


class UnknownFormat(LpqError, LookupError):
    """No installed plugin has a format with this name."""


class UnknownRecipe(LpqError, LookupError):
    """No installed plugin has a recipe with this name."""


class LayoutError(LpqError, ValueError):
    """Files of an inference engine that cannot be written, or read, as a layout has them."""


class OptionError(LpqError, ValueError):
    """An option of a quantizer that does not exist, or a value that it cannot take."""

    @classmethod
    def unknown(cls, owner: str, option: str, options: Iterable[str]) -> Self:
        """``owner`` has no such option."""
        return cls(f"{owner} has no option {brief(option)}: {suggestion(option, options)}")

    @classmethod
    def invalid(cls, owner: str, option: str, value: object, must_be: str) -> Self:
        """The option exists and cannot take this value."""
        return cls(f"{owner}: option {option!r} must be {must_be}, not {brief(value)}")


class GrammarError(OptionError):
    """A quantizer string, or a list of items, that cannot be read; ``position`` is where reading stopped."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        super().__init__(text, position, problem)
        self.text, self.position, self.problem = text, position, problem

    def message(self) -> str:
        rest = brief(self.text[self.position :]) if self.position < len(self.text) else "the end"
        pointer = f"\n  {self.text}\n  {' ' * self.position}^"
        if not self.text.isprintable() or len(self.text) > LINE:
            pointer = ""
        return f"cannot read {brief(self.text)}: {self.problem} at {rest}{pointer}"


class ImportStringError(LpqError, ImportError):
    """An import string (``"package.module:attribute"``) that cannot be imported; ``__cause__`` is the reason."""


class PluginError(LpqError):
    """A plugin that cannot be used. Raised only when a name of this plugin is looked up."""

    status: ClassVar[str] = "broken"

    def __init__(self, plugin: str, distribution: str, version: str, cause: str, remedy: str) -> None:
        super().__init__(plugin, distribution, version, cause, remedy)
        self.plugin, self.distribution, self.version = plugin, distribution, version
        self.cause, self.remedy = cause, remedy

    def message(self) -> str:
        origin = f"{self.distribution} {self.version}".strip()
        return f"plugin {self.plugin} ({origin}) cannot be used: {self.cause}. Remedy: {self.remedy}."


class PluginHidden(PluginError):
    """A plugin that is installed and that ``LPQ_LOAD_PLUGINS`` leaves out."""

    status = "hidden"


class PluginMissing(PluginError):
    """A plugin that ``LPQ_LOAD_PLUGINS`` names and that is not installed."""

    status = "missing"


def suggestion(name: str, choices: Iterable[str]) -> str:
    """A hint at the name that may have been meant: ``did you mean 'nvfp4'?``, or else all there is."""
    names = sorted(set(choices))
    every = f"choose from {', '.join(names)}" if names else "there are none"
    return near_names(name, names) or every


def near_names(name: str, choices: Iterable[str]) -> str:
    """``did you mean 'nvfp4'?``, or two names that are about as near; "" if none is near. Case does not count."""
    spellings: dict[str, list[str]] = {}
    for one in sorted(set(choices)):
        spellings.setdefault(one.lower(), []).append(one)
    text = name.lower()
    near = difflib.get_close_matches(text, spellings, n=2) if len(name) <= LINE else []
    if near:
        least = difflib.SequenceMatcher(None, near[0], text).ratio() - ALIKE
        near = difflib.get_close_matches(text, near, n=2, cutoff=least)
    spelled = [difflib.get_close_matches(name, spellings[one], n=1, cutoff=0)[0] for one in near]
    return f"did you mean {' or '.join(map(repr, spelled))}?" if spelled else ""


def words(error: BaseException | None) -> str:
    """An exception in words: its type, its message, and the line of the file that raised it.

    A line of the registry is left out, as where an import string names a missing attribute.
    """
    frames = [*traceback.walk_tb(error.__traceback__)] if error is not None else []
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in frames]
    while modules and modules[-1].startswith("importlib"):
        modules.pop()  # what imported is the place, and not how Python imports
    where = ""
    if modules and not modules[-1].startswith("lpq.registry"):
        frame, line = frames[len(modules) - 1]
        where = f" ({Path(frame.f_code.co_filename).name}, line {line})"
    return f"{type(error).__name__}: {error}{where}"
