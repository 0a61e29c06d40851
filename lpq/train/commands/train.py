"""``lpq train``: the command line of ``lpq.train``. Its options are the fields of ``TrainConfig``."""

from __future__ import annotations

import io
import signal
import time
import traceback
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from lpq.cli.output import print_error
from lpq.registry.errors import LpqError
from lpq.train import Stopped, TrainConfig, resolve, run
from lpq.train.commands.options import parameter, parameters, take, values_of
from lpq.train.launch import PATIENCE, launched, prints, work

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # typer has no name for it


class Command(TyperCommand):
    """The command of torchrun's processes: the first alone prints the options, or their faults."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        if prints():
            return super().make_context(*args, **extra)
        try:
            with redirect_stdout(io.StringIO()):
                return super().make_context(*args, **extra)
        except UsageError as error:
            time.sleep(PATIENCE.total_seconds())  # torchrun ends this process once the first has reported and ended
            raise typer.Exit(getattr(error, "exit_code", 2)) from None


def train(config: Path | None, **options: Any) -> None:
    """Train a small byte-level GPT by a recipe, then in bf16 from the same seed, and compare the two.

    It trains on the sources of Python's standard library, unless --data names other text. Ctrl-C saves, and --resume
    goes on.
    On a GPU that multiplies FP8 the recipe is fp8-current unless one is named, and the model is 4096 wide unless an
    option names a size: from there on FP8 saves time.
    Started as `torchrun --nproc-per-node N -m lpq train`, N processes train one sharded model together.
    """
    values = values_of(options)
    if launched():
        work(lambda _: run(resolve(values, config)), report_error)
    try:
        run(resolve(values, config))
    except Stopped as stopped:
        raise typer.Exit(report_error(stopped)) from None


def report_error(error: BaseException, *, aloud: bool = True, rank: int = 0) -> int:
    """Print the error that ended the run, if ``aloud``; return the exit status."""
    if isinstance(error, Stopped):
        if aloud:
            typer.echo(str(error), err=True)
        return error.exit_code
    if isinstance(error, LpqError):
        return print_error(error, aloud=aloud)
    if isinstance(error, KeyboardInterrupt):
        if aloud:
            typer.echo("lpq: interrupted; what was saved before stays, and --resume goes on from it", err=True)
        return 128 + signal.SIGINT
    if aloud:
        typer.echo(f"lpq: rank {rank} failed, and so the others end, too:\n", err=True)
        traceback.print_exception(error)
    return 1


FILE = typer.Option("--config", help="A TOML file with these options; the command line overrules it.")
take(train, parameter("config", Path, FILE), *parameters(f.name for f in fields(TrainConfig)))
