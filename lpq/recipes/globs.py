"""Patterns for names of modules: ``*`` is any characters, dots too; ``?`` is one; ``[ab]`` is a or b."""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

LONGEST = 1000
"""The most characters of a pattern."""
_SPECIAL = re.compile(r"\[!?\]?[^\]]*\]|[*?]", re.DOTALL)
_TOKEN = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern matches the whole name."""
    return literal(pattern) in name and fnmatchcase(name, pattern)


def exactly(name: str) -> str:
    """A pattern that matches this name alone. The model itself has none, and is matched by ``*``."""
    return glob.escape(name) or "*"


def numberless(text: str) -> str:
    """A name or a pattern with ``*`` in place of the numbers between its dots."""
    return ".".join("*" if part.isdecimal() else part for part in text.split("."))


def matching(patterns: Iterable[str], names: Sequence[str]) -> dict[str, list[str]]:
    """The names that each of these patterns matches."""
    every, found = "\n".join(names), dict[str, list[str]]()
    named = {name: [name] for name in names}
    for pattern in patterns:
        part = literal(pattern)
        if part == pattern:  # it is a name itself
            found[pattern] = named.get(pattern, [])
        else:  # a part that is in none of them is found at once
            found[pattern] = [n for n in names if part in n and fnmatchcase(n, pattern)] if part in every else []
    return found


def covers(a: str, b: str) -> bool:
    """Whether ``a`` is sure to match every name that ``b`` matches. When in doubt, False."""
    return literal(a) in b and _covers(_TOKEN.findall(a), _TOKEN.findall(b))


@lru_cache(8192)
def literal(pattern: str) -> str:
    """The longest piece of a pattern that stands for itself. It is in every name that the pattern matches, and in every
    pattern that it covers: most have it not, which is found at once."""
    return max(_SPECIAL.split(pattern), key=len)


def within(pattern: str, pieces: Collection[str], lengths: Collection[int]) -> list[str]:
    """The pieces, of these lengths, that are part of the pattern."""
    if len(lengths) * len(pattern) > len(pieces):
        return [piece for piece in pieces if piece in pattern]
    parts = (pattern[i : i + n] for n in lengths for i in range(len(pattern) - n + 1))
    return [part for part in dict.fromkeys(parts) if part in pieces]


def _covers(a: list[str], b: list[str]) -> bool:
    # How many tokens of a may have been used up by the tokens of b read so far, as in a finite automaton.
    reached = _skip_stars(a, {0})
    for token in b:
        stay = {i for i in reached if i < len(a) and a[i] == "*"}
        step = {i + 1 for i in reached if i < len(a) and token != "*" and _takes(a[i], token)}
        reached = _skip_stars(a, stay | step)
    return len(a) in reached


def _skip_stars(a: list[str], reached: set[int]) -> set[int]:
    for i, token in enumerate(a):
        if i in reached and token == "*":
            reached = reached | {i + 1}
    return reached


def _takes(a: str, b: str) -> bool:
    """Whether the one-character token ``a`` matches whatever the one-character token ``b`` matches."""
    return a in ("?", b) or (b != "?" and len(b) == 1 and fnmatchcase(b, a))
