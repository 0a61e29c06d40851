"""``lpq report``: the statistics of a run that ``lpq train --watch`` took."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lpq.cli.runs import CONFIG, CURVES, NUMERICS, RECIPE
from lpq.observe import NumericsError, Readings
from lpq.train import runs

Run = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="The directory of a run, or a file of `Numerics.write`; default: the newest run under runs/.",
    ),
]
Lines = Annotated[int, typer.Option("--lines", min=0, help="The most lines of the table; 0: all.")]


def report(run: Run = None, lines: Lines = 20) -> None:
    """Show how well the formats of a run fit its tensors, and write a page that shows it over time.

    The table has the last step that was watched, the most noise first. The page `numerics.html` lies beside it: one
    file, which asks for nothing from outside.
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
    readings = Readings.read(place)
    typer.echo(readings.table(lines))
    readings.page(page)
    typer.echo(f"the page is {page}")
