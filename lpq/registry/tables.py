"""Tables for people, as every command prints them: rows of plain text under a title."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

from lpq.registry.showing import printable

NARROW = 70
"""The columns of a terminal below which a table would break words: each row is shown as a record."""
NUMBER = re.compile(r"[-+–\d.,x/%]{0,12}")
"""A cell that is not broken where a table is wider than the terminal: the heading of its column is."""
FOLDED = 8
"""The least columns for a cell that may be broken; in a terminal with fewer each row is a record, too."""
Row = Sequence[object]


def table(title: str, columns: Sequence[str], rows: Iterable[Row], console: Console | None = None) -> None:
    """Print a table under a title. Cells are plain text, and a column with nothing in it is left out.

    In a narrow terminal each row is a record: its first cell, and a line for each other one that is not empty. Where
    there is no terminal, nothing is broken.
    """
    cells = _Cells.of(columns, rows)
    cells.print(title, console or cells.console())


def drawn(title: str, columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return what ``table`` prints, without styles."""
    cells, out = _Cells.of(columns, rows), io.StringIO()
    cells.print(title, Console(file=out, width=cells.console().width))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


@dataclass(frozen=True)
class _Cells:
    """The columns of a table that are not empty."""

    heads: list[str]
    columns: list[list[str]]

    @classmethod
    def of(cls, columns: Sequence[str], rows: Iterable[Row]) -> _Cells:
        cells = [[printable(str(cell)) if cell is not None else "" for cell in row] for row in rows]
        filled = [i for i, _ in enumerate(columns) if i == 0 or any(row[i] for row in cells)]
        return cls([columns[i] for i in filled], [[row[i] for row in cells] for i in filled])

    def console(self) -> Console:
        """The console of this process; without a terminal it is as wide as the table."""
        console = Console()
        if not (console.is_terminal or os.environ.get("COLUMNS")):
            console.width = max(console.width, _width(self.natural))
        return console

    @property
    def natural(self) -> list[int]:
        """The width of each column with nothing broken."""
        texts = [(head, *cells) for head, cells in zip(self.heads, self.columns, strict=True)]
        return [max(len(line) for text in column for line in text.split("\n")) for column in texts]

    def print(self, title: str, console: Console) -> None:
        """Print them as a table or, where one would break words, as records."""
        console.print(f"[bold]{escape(printable(title))}[/bold]")
        if console.width < NARROW:
            self._print_records(console)
        elif _width(self.natural) <= console.width:
            self._print_table(console, [(head, False, None) for head in self.heads])
        else:
            self._print_broken(console)

    def _print_table(self, console: Console, heads: Sequence[tuple[str, bool, int | None]], **how: Any) -> None:
        """``heads``: each with whether its cells may be broken, and the width of its column, if it is fixed."""
        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, **how)
        for i, (head, folds, width) in enumerate(heads):
            side: JustifyMethod = "right" if i and all(map(NUMBER.fullmatch, self.columns[i])) else "left"
            grid.add_column(escape(head), justify=side, overflow="fold", no_wrap=not folds, width=width)
        for row in zip(*self.columns, strict=True):
            grid.add_row(*map(escape, row))
        edge = [""] if how else []
        console.print(*edge, grid, *edge, sep="\n")

    def _print_broken(self, console: Console) -> None:
        """Print them in a terminal that is narrower: numbers and words of the first column are not broken."""
        heads, least = list[tuple[str, bool, int | None]](), 0
        for i, (head, cells) in enumerate(zip(self.heads, self.columns, strict=True)):
            number = i > 0 and all(map(NUMBER.fullmatch, cells))
            folds = not number and (i > 0 or any(" " in cell for cell in cells))
            heads.append((head.replace("-", "-\n").replace(" x ", " x\n") if number else head, folds, None))
            words = " ".join([heads[-1][0], *cells]).split() if folds else [*heads[-1][0].split("\n"), *cells]
            least += min(max(map(len, words)), FOLDED) if folds and i else max(map(len, words))
        if (spare := console.width - least - 2 * (len(heads) - 1)) < 0:
            self._print_records(console)
        else:
            words = " ".join([self.heads[0], *self.columns[0]]).split()
            if heads[0][1]:
                heads[0] = (self.heads[0], True, min(self.natural[0], max(map(len, words)) + spare // 2))
            self._print_table(console, heads, show_edge=False, padding=(0, 1, 0, 0))

    def _print_records(self, console: Console) -> None:
        for first, *others in zip(*self.columns, strict=True):
            record = Table.grid("", "", "", padding=(0, 2, 0, 0))
            for head, cell in zip(self.heads[1:], others, strict=True):
                if cell:
                    record.add_row("", escape(head), escape(cell))
            console.print(f"\n{escape(first)}", record, sep="\n")
        console.print()


def _width(columns: Sequence[int]) -> int:
    """The width of a table with these columns, and its edges."""
    return sum(columns) + 3 * len(columns) - 1
