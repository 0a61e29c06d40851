"""A terminal's screen: what stands on it after some output, with colours. It knows what rich writes, and no more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_PIECE = re.compile(r"\x1b\[(?P<numbers>[\d;?]*)(?P<letter>[A-Za-z])|(?P<one>.)", re.DOTALL)
COLOURS = (
    "#484f58", "#ff7b72", "#7ee787", "#e3b341", "#79c0ff", "#d2a8ff", "#56d4dd", "#d5dbe3",
    "#6e7681", "#ffa198", "#a5f3b0", "#f2cc60", "#a5d6ff", "#e2c5ff", "#8be9f0", "#ffffff",
)  # fmt: skip
"""The sixteen colours that have names, as they look on a dark ground."""
WORDS = {1: "bold", 2: "dim", 3: "italic"}


class Cell(NamedTuple):
    """A character, and how it looks: a colour, ``bold``, ``dim``, ``italic``."""

    character: str = " "
    style: tuple[str, ...] = ()


Row = tuple[Cell, ...]


def text_of(row: Row) -> str:
    """The characters of a row."""
    return "".join(cell.character for cell in row).rstrip()


class Screen:
    """A screen of ``columns`` and ``rows``, which scrolls."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns = columns
        self._cells = [[Cell()] * columns for _ in range(rows)]
        self._x = self._y = 0
        self._style: tuple[str, ...] = ()

    def rows(self) -> list[Row]:
        """What stands there."""
        return [tuple(row) for row in self._cells]

    def write(self, output: str) -> None:
        """Take output as a terminal does. A sequence that is not known is an error, lest the film lie."""
        for piece in _PIECE.finditer(output):
            if piece["one"] is not None:
                self._put(piece["one"])
            else:
                self._control(piece["letter"], piece["numbers"])

    def _put(self, character: str) -> None:
        if character == "\n":
            self._down()
        elif character == "\r":
            self._x = 0
        elif character < " ":
            raise ValueError(f"the screen knows no character {character!r}")
        else:
            if self._x == self.columns:
                self._x = 0
                self._down()
            self._cells[self._y][self._x] = Cell(character, self._style)
            self._x += 1

    def _down(self) -> None:
        if self._y + 1 < len(self._cells):
            self._y += 1
        else:
            self._cells = [*self._cells[1:], [Cell()] * self.columns]

    def _control(self, letter: str, numbers: str) -> None:
        if letter == "m":
            self._look([int(n or 0) for n in numbers.split(";")])
        elif letter == "A":
            self._y = max(0, self._y - int(numbers or 1))
        elif letter == "K" and numbers in ("", "0"):
            self._cells[self._y][self._x :] = [Cell()] * (self.columns - self._x)
        elif letter == "K" and numbers == "2":
            self._cells[self._y] = [Cell()] * self.columns
        elif numbers not in ("?25", "?2004") or letter not in "hl":  # the cursor is not drawn
            raise ValueError(f"the screen knows no sequence ESC[{numbers}{letter}")

    def _look(self, numbers: list[int]) -> None:
        left = iter(numbers)
        for number in left:
            if number == 0:
                self._style = ()
            elif number in WORDS:
                self._style = (*self._style, WORDS[number])
            elif number == 22:
                self._style = tuple(part for part in self._style if part not in ("bold", "dim"))
            elif number == 23:
                self._style = tuple(part for part in self._style if part != "italic")
            elif number in (38, 39) or 30 <= number < 38 or 90 <= number < 98:
                self._style = tuple(part for part in self._style if not part.startswith("#"))
                if number != 39:
                    self._style = (_colour(number, left), *self._style)
            else:
                raise ValueError(f"the screen knows no look {number}")


def _colour(number: int, left: Iterator[int]) -> str:
    if number != 38:
        return COLOURS[number - 30 if number < 38 else number - 82]
    if next(left) == 2:
        return f"#{next(left):02x}{next(left):02x}{next(left):02x}"
    index = next(left)
    if index < 16:
        return COLOURS[index]
    if index >= 232:
        return f"#{8 + 10 * (index - 232):02x}" + 2 * f"{8 + 10 * (index - 232):02x}"
    red, green, blue = ((index - 16) // size % 6 for size in (36, 6, 1))
    return "#" + "".join(f"{55 + 40 * part if part else 0:02x}" for part in (red, green, blue))
