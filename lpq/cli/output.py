"""How the commands print: a rich table for people, JSON for programs, errors on stderr."""

from __future__ import annotations

import json
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
"""The errors of a command that is written wrongly: it has a name, an option or a value that does not exist."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table under a title. Cells are plain text, and a column with nothing in it is left out."""
    cells = [[escape(printable(str(cell))) if cell is not None else "" for cell in row] for row in rows]
    used = [i for i, _ in enumerate(columns) if i == 0 or any(row[i] for row in cells)]
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i in used:
        made.add_column(columns[i], overflow="fold", no_wrap=i == 0)
    for row in cells:
        made.add_row(*(row[i] for i in used))
    console = Console()
    console.print(f"[bold]{escape(printable(title))}[/bold]")
    console.print(made)


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
    """Whether the error comes from a recipe or a policy with a part that has such a name or option."""
    if "lpq.recipes" not in sys.modules:  # it imports torch, which other commands do without
        return False
    from lpq.recipes.errors import PluginRecipeError, RecipeError, UnknownKey

    if isinstance(error, PluginRecipeError):
        return False
    return isinstance(error, UnknownKey) or (isinstance(error, RecipeError) and isinstance(error.__cause__, USAGE))
