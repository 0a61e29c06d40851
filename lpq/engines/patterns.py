"""Regular expressions of others' files, matched in time that is known beforehand.

Python's ``re`` tries one way after the other, which takes exponential time for some patterns, and a high power of the
length of a name for patterns of many ``.*``. RE2, whose binding would be one more compiled dependency, has no (?!…), by
which such files leave layers out. Here all ways are followed at once: a set of places in the name, as the bits of a
number, goes through the pattern. ``re`` parses it. Patterns that begin alike share these steps, so that thousands of
them cost a name little where they differ in the numbers of layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from lpq.registry import LayoutError
from lpq.registry.showing import brief

LONGEST = 1000
"""The most characters of a pattern."""
STEPS = 5_000_000
"""The most steps that patterns of one file take, over all names, beyond one for each character: some seconds."""
CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda c: c.isalnum() or c == "_",
}
CHARACTERS = ("ANY", "LITERAL", "NOT_LITERAL", "IN")
ENDS = ("AT_BEGINNING", "AT_BEGINNING_STRING", "AT_END", "AT_END_STRING")


class Node(NamedTuple):
    """A part of a pattern: its kind as ``re`` calls it, its argument, and the patterns in it."""

    kind: str
    argument: Any = None
    inner: tuple[tuple[Node, ...], ...] = ()


Rest = dict[Node | None, "Rest"]
"""The next steps of patterns, each with what comes after it; None: the end of one."""


class Patterns:
    """Regular expressions, each of which matches the beginning of a name, as ``re.match`` does."""

    def __init__(self, texts: Iterable[str]) -> None:
        all_texts = [*texts]
        self._all: Rest = {}
        for text in all_texts:
            rest = self._all
            for step in _read(text):
                rest = rest.setdefault(step, {})
            rest[None] = {}
        self._once = sum(map(len, all_texts))
        self._budget = STEPS

    def match(self, text: str) -> bool:
        """Whether one of the expressions matches."""
        self._budget = min(STEPS, self._budget + self._once)
        name, ways = _Name(text), [(self._all, 1)]
        while ways:
            rest, places = ways.pop()
            self._take(len(rest))
            for step, after in rest.items():
                if step is None:
                    return True
                if reached := self._after(step, places, name):
                    ways.append((after, reached))
        return False

    def _take(self, steps: int) -> None:
        self._budget -= steps
        if self._budget < 0:
            raise LayoutError("config.json: matching its patterns with the names of layers takes too long")

    def _through(self, steps: Sequence[Node], places: int, name: _Name) -> int:
        """The places that can be reached from these: one before each character, and one behind the last."""
        self._take(len(steps))
        for step in steps:
            places = self._after(step, places, name)
            if not places:
                break
        return places

    def _after(self, step: Node, places: int, name: _Name) -> int:
        """The places that one step reaches from these."""
        if step.kind in CHARACTERS:
            return (places & name.where(step)) << 1
        if step.kind == "AT":
            return places & (1 if "BEGINNING" in step.argument else name.ends(step.argument))
        if step.kind == "REPEAT":
            return self._repeated(step, places, name)
        if step.kind == "BRANCH":
            reached = 0
            for branch in step.inner:
                reached |= self._through(branch, places, name)
            return reached
        ahead = (1 << i for i in range(places.bit_length()) if places >> i & 1)
        is_positive = step.kind == "ASSERT"
        return sum(i for i in ahead if bool(self._through(step.inner[0], i, name)) == is_positive)

    def _repeated(self, step: Node, places: int, name: _Name) -> int:
        least, most = step.argument
        (body,) = step.inner
        for _ in range(least):
            before, places = places, self._through(body, places, name)
            if places in (0, before):
                break
        if most > len(name.text) and len(body) == 1 and body[0].kind in CHARACTERS:
            along = name.where(body[0])  # a carry goes to the end of each run of ones
            return (((places & along) + along) ^ along) | places
        reached = new = places
        for _ in range(min(most - least, len(name.text) + 1)):
            new = self._through(body, new, name) & ~reached
            reached |= new
            if not new:
                break
        return reached


class _Name:
    """A name, and where in it the characters are that a part of a pattern matches: a bit for each place."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._of: dict[str, int] = {}
        for i, character in enumerate(text):
            self._of[character] = self._of.get(character, 0) | 1 << i
        self._where: dict[Node, int] = {}

    def where(self, step: Node) -> int:
        if (places := self._where.get(step)) is not None:
            return places
        fitting = sum(bits for character, bits in self._of.items() if _is(step.kind, step.argument, character))
        self._where[step] = fitting
        return fitting

    def ends(self, kind: str) -> int:
        before_newline = 1 << len(self.text) - 1 if kind == "AT_END" and self.text.endswith("\n") else 0
        return 1 << len(self.text) | before_newline


def _read(text: str) -> tuple[Node, ...]:
    """The parts of a pattern; an error if it has some that are not followed here."""
    try:
        if len(text) > LONGEST:
            raise LayoutError(f"it has {len(text)} characters, and the most are {LONGEST}")
        tree = _parser.parse(text)
        if tree.state.flags & ~re.UNICODE.value:
            raise LayoutError("it has flags")
        return _steps(tree)
    except (re.error, RecursionError, OverflowError, LayoutError) as error:
        raise LayoutError(f"config.json: {brief(text)} is no pattern of layers that lpq reads: {error}") from error


def _steps(tree: Any) -> tuple[Node, ...]:
    nodes: list[Node] = []
    for op, argument in tree:
        kind = str(op)
        if kind in CHARACTERS:
            nodes.append(Node(kind, tuple(argument) if kind == "IN" else argument))
        elif kind in ("MAX_REPEAT", "MIN_REPEAT"):
            nodes.append(Node("REPEAT", (int(argument[0]), int(argument[1])), (_steps(argument[2]),)))
        elif kind == "SUBPATTERN" and not argument[1] and not argument[2]:
            nodes += _steps(argument[3])
        elif kind == "BRANCH":
            nodes.append(Node(kind, None, tuple(map(_steps, argument[1]))))
        elif kind in ("ASSERT", "ASSERT_NOT") and argument[0] > 0:
            nodes.append(Node(kind, None, (_steps(argument[1]),)))
        elif kind == "AT" and str(argument) in ENDS:
            nodes.append(Node(kind, str(argument)))
        else:
            raise LayoutError(f"it has {kind} {argument if kind == 'AT' else ''}".strip())
    return tuple(nodes)


def _is(kind: str, argument: Any, character: str) -> bool:
    """Whether that part of a pattern matches a character."""
    if kind == "ANY":
        return character != "\n"
    if kind in ("LITERAL", "NOT_LITERAL"):
        return (ord(character) == int(argument)) == (kind == "LITERAL")
    if kind == "RANGE":
        return bool(argument[0] <= ord(character) <= argument[1])
    if kind == "CATEGORY":
        name = str(argument)
        return CATEGORIES[name.replace("_NOT_", "_")](character) != ("_NOT_" in name)
    negated = str(argument[0][0]) == "NEGATE"
    return any(_is(str(item[0]), item[1], character) for item in argument[negated:]) != negated
