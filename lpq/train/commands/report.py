"""``lpq report``: the statistics of a run that ``lpq train --watch`` took."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lpq.cli.runs import CONFIG, CURVES, NUMERICS, RECIPE
from lpq.files.outputs import check_writable
from lpq.observe import NumericsError, Readings
from lpq.registry.errors import OptionError
from lpq.train import runs

Run = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="The directory of a run, or a file of `Numerics.write`; default: the newest run under runs/.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="PAGE", help="The file for the page. Default: numerics.html in RUN."),
]
Lines = Annotated[int, typer.Option("--lines", min=0, help="The most lines of the table; 0: all.")]


def report(run: Run = None, out: Out = None, lines: Lines = 20) -> None:
    """Show how well the formats of a run fit its tensors, and write a page that shows it over time.

    The table has the last step that was watched, the most noise first. The page is one file, which asks for nothing
    from outside.
    """
    path = runs.newest("to report on: name a run, or train one with --watch 100") if run is None else run
    if path.is_dir():
        place = path / RECIPE / NUMERICS if (path / CONFIG).is_file() else path / NUMERICS
        page = path / runs.PAGE
    else:
        place, page = path, path.with_suffix(".html")
    if not path.exists():
        raise NumericsError(f"{path} does not exist: name the directory of a run of lpq train --watch 100")
    if any(path.glob(CURVES)):
        raise NumericsError(
            f"{path} is of lpq compare, which takes no statistics: `lpq compare --out {path}` tells what is there, and "
            "lpq train --watch 100 takes some"
        )
    if not place.is_file():
        raise NumericsError(
            f"{path} has no statistics: train with --watch 100, or write them by lpq.observe.numerics to {NUMERICS}"
        )
    page = page if out is None else out
    if page.absolute() == place.absolute():
        raise OptionError(f"{page} has the statistics, and the page would be written over them: choose another --out")
    check_writable(page, "choose another --out")
    readings = Readings.read(place)
    if not readings.readings():
        raise NumericsError(
            f"{place} has no line: the run came to no step whose number is a multiple of --watch, or its recipe "
            "encodes no tensor, as bf16 does"
        )
    typer.echo(readings.table(lines))
    readings.page(page)
    typer.echo(f"the page is {page}")
