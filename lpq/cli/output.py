"""How the commands print: a rich table for people, JSON for programs, errors on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console

from lpq.registry.errors import LpqError, OptionError, UnknownFormat, UnknownRecipe
from lpq.registry.loader import PluginInfo
from lpq.registry.showing import printable

USAGE = (OptionError, UnknownFormat, UnknownRecipe)
"""The errors of a command that must be written otherwise: a name, an option or a value in it is none that there is."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


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
