"""The one grammar in which quantizers are written, and its inverse.

``NAME`` or ``NAME(option=value, …)``, as in ``nvfp4(block=16x16, rht=true)``. A value is ``true``, ``false``,
``none``, a number, a bare word, a quoted string or another quantizer, as in
``hybrid(row=mxfp8, col=nvfp4(rht=true))``. ``parse`` reads back what ``str`` of a ``Call`` writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from lpq.registry.errors import GrammarError, OptionError
from lpq.registry.showing import brief

Value: TypeAlias = "bool | int | float | str | Call | None"

NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
LONGEST, DEEPEST = 10_000, 16
"""The most characters of a text, and the most quantizers in each other."""
WORD = 300
"""The most characters of a word or a number."""
_WORD = re.compile(r"[\w.+-]+", re.ASCII)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|' r"'(?:[^'\\]|\\.)*'", re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_FLOAT = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf|nan)", re.ASCII | re.IGNORECASE)
_CONSTANTS: dict[str, bool | None] = {"true": True, "false": False, "none": None}
SKIP = "skip"
"""The word that stands in a file in place of a recipe, for a layer that is left alone."""


@dataclass(frozen=True)
class Call:
    """A format's name with the options given to it; ``str`` is its text."""

    name: str
    options: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        inside = ", ".join(f"{key}={_text(value)}" for key, value in self.options)
        return f"{self.name}({inside})" if inside else self.name


def parse(text: str) -> Call:
    """Read a quantizer string."""
    reader = _Reader(text)
    call = reader.call(reader.take(NAME, "expected the name of a format"))
    if not reader.at_end:
        raise reader.error("expected nothing more")
    return call


def split_items(text: str) -> list[tuple[str, str]]:
    """Split ``text``, as ``"fprop=mxfp8, dgrad=nvfp4(rht=true)"``, into keys and the texts of their values."""
    reader = _Reader(text)
    items = [(key, text[start:end].strip()) for key, _, start, end in reader.items()]
    if not reader.at_end:
        raise reader.error("expected ',' or the end")
    return items


class _Reader:
    """A position in a text, which every method moves past what it reads and the blanks behind it."""

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise OptionError(
                f"{brief(text)} has {len(text)} characters: a recipe or a quantizer has at most {LONGEST}"
            )
        self.text, self.depth = text, 0
        self.move(0)

    def move(self, position: int) -> None:
        self.position = len(self.text) - len(self.text[position:].lstrip())

    @property
    def at_end(self) -> bool:
        return self.position == len(self.text)

    def error(self, problem: str) -> GrammarError:
        return GrammarError(self.text, self.position, problem)

    def match(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self.text, self.position)
        if match is None:
            return None
        self.move(match.end())
        return match[0]

    def symbol(self, character: str) -> bool:
        """Whether this character comes next."""
        is_next = self.text.startswith(character, self.position)
        if is_next:
            self.move(self.position + 1)
        return is_next

    def take(self, pattern: re.Pattern[str], problem: str) -> str:
        token = self.match(pattern)
        if token is None:
            raise self.error(problem)
        return token

    def call(self, name: str) -> Call:
        """The options that follow a name, if any do."""
        options: list[tuple[str, Value]] = []
        if self.symbol("(") and not self.symbol(")"):
            self.depth += 1
            if self.depth > DEEPEST:
                raise self.error(f"quantizers stand in each other at most {DEEPEST} deep; expected no other")
            options = [(key, value) for key, value, _, _ in self.items()]
            self.depth -= 1
            if not self.symbol(")"):
                raise self.error("expected ',' or ')'")
        return Call(name, tuple(options))

    def items(self) -> Iterator[tuple[str, Value, int, int]]:
        """``key=value, …`` with the span of each value."""
        keys: set[str] = set()
        while True:
            key_start = self.position
            key = self.take(NAME, "expected 'key=value'")
            if key in keys:
                raise GrammarError(self.text, key_start, f"{key!r} is given twice")
            keys.add(key)
            if not self.symbol("="):
                raise self.error(f"expected '=' after {key!r}")
            start = self.position
            yield key, self.value(), start, self.position
            if not self.symbol(","):
                return

    def value(self) -> Value:
        quoted = self.match(_QUOTED)
        if quoted is not None:
            return re.sub(r"\\(.)", r"\1", quoted[1:-1], flags=re.DOTALL)
        word = self.take(_WORD, "expected a value")
        if len(word) > WORD:
            raise GrammarError(self.text, self.position, f"no word or number has {len(word)} characters")
        if self.text.startswith("(", self.position) and NAME.fullmatch(word):
            return self.call(word)
        return meaning(word)


def meaning(word: str) -> bool | int | float | str | None:
    """The value of a word in a quantizer string: the word itself if it means nothing else."""
    if word.lower() in _CONSTANTS:
        return _CONSTANTS[word.lower()]
    if _INTEGER.fullmatch(word):
        return int(word)
    return float(word) if _FLOAT.fullmatch(word) else word


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | Call):
        return str(value)
    if not isinstance(value, str):
        raise OptionError(f"{brief(value)} is a {type(value).__name__}, which no quantizer string can hold")
    if _WORD.fullmatch(value) and meaning(value) == value:
        return value
    return '"' + re.sub(r'["\\]', r"\\\g<0>", value) + '"'
