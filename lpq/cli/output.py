"""How the commands print: a rich table for people, JSON for programs, errors on stderr."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lpq.registry.errors import LpqError, OptionError, UnknownFormat, UnknownRecipe
from lpq.registry.loader import PluginInfo
from lpq.registry.showing import printable

USAGE = (OptionError, UnknownFormat, UnknownRecipe)
"""The errors of a command that must be written otherwise: a name, an option or a value in it is none that there is."""

NARROW = 70
"""The columns of a terminal below which a table would break words: each row is shown as a record."""

NUMBER = re.compile(r"[\d.,x]{0,12}")
"""A cell that is not broken where a table is wider than the terminal: the heading of its column is."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table under a title. Cells are plain text, and a column with nothing in it is left out.

    In a narrow terminal each row is a record: its first cell, and a line for each other one that is not empty.
    """
    cells = [[escape(printable(str(cell))) if cell is not None else "" for cell in row] for row in rows]
    used = [i for i, _ in enumerate(columns) if i == 0 or any(row[i] for row in cells)]
    console = Console()
    console.print(f"[bold]{escape(printable(title))}[/bold]")
    if console.width < NARROW:
        print_records(console, [escape(columns[i]) for i in used], ([row[i] for i in used] for row in cells))
        return
    natural = [max(len(text) for text in (columns[i], *(row[i] for row in cells))) for i in used]
    wide = sum(natural) + 3 * (len(used) - 1) > console.width
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=not wide, padding=(0, 1, 0, 0) if wide else (0, 1))
    for i in used:
        column = [row[i] for row in cells]
        if wide and i and all(map(NUMBER.fullmatch, column)):
            made.add_column(columns[i].replace("-", "-\n").replace(" x ", " x\n"), no_wrap=True)
        else:
            made.add_column(columns[i], overflow="fold", no_wrap=i == 0 and not (wide and " " in column[0]))
    for row in cells:
        made.add_row(*(row[i] for i in used))
    edge = [""] if wide else []
    console.print(*edge, made, *edge, sep="\n")


def print_records(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print each row as a record. Cells and columns are markup of rich."""
    for first, *others in rows:
        record = Table.grid("", "", "", padding=(0, 2, 0, 0))
        for column, cell in zip(columns[1:], others, strict=True):
            if cell:
                record.add_row("", column, cell)
        console.print(f"\n{first}", record, sep="\n")
    console.print()


def print_text(text: str) -> None:
    """Print a sentence, broken between words where the terminal ends. It is plain text."""
    Console(highlight=False).print(printable(text), markup=False)


def as_json(value: object) -> None:
    """Print JSON."""
    typer.echo(json.dumps(value, indent=2))


def print_broken(plugins: Iterable[PluginInfo]) -> None:
    """Print on stderr which plugins cannot be used, and the remedy."""
    for plugin in plugins:
        if plugin.error is not None:
            typer.echo(f"lpq: {plugin.error}", err=True)


def print_error(error: LpqError, *, aloud: bool = True) -> int:
    """Print the error that ended a command on stderr, if ``aloud``; return the exit status."""
    if aloud:
        print(f"lpq: {error}", file=sys.stderr)
    return 2 if isinstance(error, USAGE) or _misnames(error) else 1


def _misnames(error: LpqError) -> bool:
    """Whether the error is of the recipe or the policy as it is written, and not of a plugin or an absent file."""
    if "lpq.recipes" not in sys.modules:  # it imports torch, which other commands do without
        return False
    from lpq.recipes.errors import PluginRecipeError, RecipeError

    if not isinstance(error, RecipeError) or isinstance(error, PluginRecipeError):
        return False
    cause = error.__cause__
    return cause is None or isinstance(cause, (*USAGE, ValueError))  # a file's text is a value, too
