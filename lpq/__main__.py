"""The command ``lpq``, or ``lpquant``, and ``python -m lpq``. Each subcommand is imported when it runs.

So ``lpq formats`` needs no torch and ``lpq --help`` needs nothing at all. An ``LpqError`` ends a command with
its words on stderr: status 2 for a name, an option or a value that does not exist, 1 for everything else.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from lpq.registry.errors import LpqError, suggestion

ClickException: Any = typer.BadParameter.__mro__[2]  # typer has no name for it

COMMANDS = {
    "train": ("lpq.train.commands.train", "Train a small GPT by a recipe, next to bf16."),
    "compare": ("lpq.train.commands.compare", "Train by several recipes and in bf16, from several seeds, and compare."),
    "formats": ("lpq.cli.listing", "List the number formats that are installed."),
    "recipes": ("lpq.cli.listing", "List the named recipes."),
    "plugins": ("lpq.cli.listing", "List the plugins: where each comes from, what it brings, what is wrong."),
    "doctor": ("lpq.cli.doctor", "Show what this machine can run: versions, devices, plugins, kernels."),
    "explain": ("lpq.cli.explain", "Show what a recipe does: operands, quantizers, kernels."),
    "memory": (
        "lpq.cli.memory",
        "Show how many bytes the weights of a model take: stored, gathered, in the optimizer.",
    ),
    "bench": ("lpq.cli.bench", "Time layers on this machine, in bf16 and by recipes."),
    "advise": ("lpq.cli.advise", "Predict what recipes gain for a model on a GPU, and give the line to paste."),
    "search": (
        "lpq.train.commands.search",
        "Choose the recipe of each product of each layer under a budget, and write a policy.",
    ),
    "report": (
        "lpq.train.commands.report",
        "Show how well the formats of a run that was watched fit, and draw it on a page.",
    ),
    "calibrate": (
        "lpq.train.commands.calibrate",
        "Make the scales of a checkpoint static, and list its layers by their noise.",
    ),
    "export": ("lpq.cli.export", "Write a checkpoint of lpq for inference engines."),
    "check": ("lpq.cli.check", "Run the conformance kit on a format."),
    "new-plugin": ("lpq.cli.new_plugin", "Write a package with a new format, ready to install."),
}
"""Each command: the module that has a function of its name, and its line in ``lpq --help``."""


def load(name: str) -> Any:
    """Import a command and return it. A class ``Command`` in its module changes how arguments are read."""
    module = import_module(COMMANDS[name][0])
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    single.command(name, cls=getattr(module, "Command", None))(getattr(module, name.replace("-", "_")))
    return typer.main.get_command(single)


NAMES = ("lpq", "lpquant")
"""The names of the installed command, the usual one first."""


class Unloaded(TyperCommand):
    """A command that is listed but not imported; running it, or asking for its help, imports it."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return load(str(self.name)).make_context(info_name, args, parent, **extra)


class Commands(TyperGroup):
    """The commands of the table above."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return Unloaded(cmd_name, help=COMMANDS[cmd_name][1]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"there is no command {args[0]!r}: {suggestion(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)


def remedy(error: Any, arguments: Sequence[str]) -> str:
    """The remedy for words that no argument takes: they are parts of a recipe, or a recipe that an option takes."""
    if "unexpected extra argument" not in error.format_message():
        return ""
    if any(word.endswith(",") for word in arguments):
        return " A recipe with commas is one argument: put it between quotes."
    options = [option for parameter in error.ctx.command.params for option in parameter.opts]
    return " A recipe is given as --recipe NAME." if "--recipe" in options else ""


app = typer.Typer(
    name="lpq",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(is_set: bool) -> None:
    if is_set:
        import lpq

        typer.echo(f"lpq {lpq.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=show_version, is_eager=True
    ),
) -> None:
    """Low-precision training in which a number format is a plugin."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; the installed commands and ``python -m lpq`` call it."""
    called = Path(sys.argv[0]).name
    name = called if called in NAMES else NAMES[0]
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another, and nothing is lost
    show = warnings.showwarning

    def show_in_words(message: Any, category: Any, file: str, *place: Any) -> None:
        """Show a warning that lpq would point to the caller's line with, which here is no user's."""
        if file == typer.main.__file__:
            print(f"lpq: {message}", file=sys.stderr)
        else:
            show(message, category, file, *place)

    try:
        with warnings.catch_warnings():
            warnings.showwarning = cast("Any", show_in_words)
            raise SystemExit(app(list(arguments) if arguments is not None else None, name, standalone_mode=False) or 0)
    except ClickException as error:  # of typer, which would draw a frame around it
        about = getattr(getattr(error, "ctx", None), "command_path", "lpq")
        if words := error.format_message():  # there are none where the help was printed
            stop = "" if words.endswith((".", "?")) else "."
            hint = remedy(error, sys.argv[1:] if arguments is None else arguments)
            print(f"lpq: {words}{stop}{hint} See {about} --help", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except LpqError as error:
        from lpq.cli.output import print_error  # it needs more than a command that ends well may

        raise SystemExit(print_error(error)) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"lpq: {error.strerror}: what was being written is not complete", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # Python's own end would try to write the rest


if __name__ == "__main__":
    main()
