"""``lpq compare``: recipes beside bf16 over several seeds, as a table, a figure and files of curves."""

from __future__ import annotations

import inspect
import shlex
import time
from collections.abc import Container
from pathlib import Path
from typing import Annotated, Any

import typer

from lpq.train.commands.options import parameters, take, values_of
from lpq.train.commands.train import Command, report_error
from lpq.train.compare_config import SHARED, SIZES, CompareConfig, training
from lpq.train.errors import Stopped, TrainError, TrainOptionError
from lpq.train.launch import launched, prints, work
from lpq.train.taking_turns import Processes

__all__ = ["Command", "compare"]
FREE = ("recipes", "out", "at_once", "time_limit", "beside", "device", "record", "checkpoint_every")
"""The options that no number depends on."""
TABLE, FIGURE = "table.md", "compare.svg"
BY_SIZE = "by --size"
DEFAULTS = {
    **dict.fromkeys(("layers", "heads", "width", "batch", "seq", "lr", "data", "text", "compile"), BY_SIZE),
    "validate_every": "a quarter of the steps",
    "checkpoint_every": "a quarter of the steps",
}

Recipes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE...",
        help="Recipes and policies: names that `lpq recipes` lists, the grammar, or TOML files. None: report the "
        "results in --out.",
    ),
]
Seeds = Annotated[int, typer.Option("--seeds", help="How many seeds, from 0 on.")]
Size = Annotated[
    str, typer.Option("--size", help=f"The model and its text: {', '.join(SIZES)}.", show_default="60m; on a CPU toy")
]
Tokens = Annotated[
    str,
    typer.Option(
        "--tokens",
        help="Bytes of text that each training reads, as 200M; rounded to whole steps.",
        show_default=BY_SIZE,
    ),
]
Out = Annotated[Path, typer.Option("--out", help="The directory of the curves; the same one goes on.")]
AtOnce = Annotated[
    int,
    typer.Option(
        "--at-once",
        min=1,
        help="Trainings at the same time.",
        show_default="one for each GPU, or for each processor core",
    ),
]
Limit = Annotated[
    float,
    typer.Option(
        "--time-limit", min=0, help="Seconds from the command's start after which every training saves and stops."
    ),
]

Beside = Annotated[
    str | None,
    typer.Option(
        "--beside",
        metavar="RECIPE",
        help="A recipe of the comparison: also tell how far the others are from it, and which part of its gap each "
        "closes.",
    ),
]


def compare(
    context: typer.Context, recipes: Recipes, seeds: Seeds, size: Size, tokens: Tokens, out: Out, at_once: AtOnce,
    time_limit: Limit, beside: Beside, **options: Any,
) -> None:  # fmt: skip
    """Train the same model from the same seeds by each recipe and in bf16, and tell how far their losses are apart.

    For a seed all have the same first weights and the same batches. The model has fp32 parameters, bf16 autocast and
    fused AdamW; recipes are for the blocks' layers, and the embedding, which is the head, too, stays as it is.
    Trainings at the same time are processes, which the command starts itself; with several GPUs each has one. Started
    as `torchrun --nproc-per-node N -m lpq compare`, each of N processes takes the next training that is not done.
    The same command goes on after Ctrl-C, a time limit or a crash: a training that ended is its curve, a small JSON
    file in --out, and is not repeated.
    Without a recipe the command tells what is in --out; for that it needs the curves alone.
    """
    began = time.monotonic()
    if not recipes and (idle := _given(context, ("out", "beside"))):
        raise TrainOptionError(
            f"{', '.join(map(_flag, idle))} would change nothing: without a recipe the command tells what is in --out. "
            "Name recipes to train, or leave it out"
        )

    def job(processes: Processes) -> None:
        trainings = None
        if recipes:
            from rich.console import Console

            from lpq.train import compare
            from lpq.train.machine import pick_device

            values = values_of(options)
            usual = "toy" if pick_device(values.get("device", "auto")).type == "cpu" else "60m"
            settings = training(size or usual, tokens, values)
            config = CompareConfig(tuple(recipes), seeds, settings, out, at_once, time_limit, _command(context), beside)
            trainings = compare.run(config, Console(force_terminal=None if prints() else False), began, processes)
        if prints():
            _tell(out, trainings, beside)

    if launched():
        work(lambda store: job(Processes.of_torchrun(store)), report_error, group=False)
    try:
        job(Processes())
    except Stopped as stopped:
        raise typer.Exit(report_error(stopped)) from None


def _command(context: typer.Context) -> str:
    """The command, without what the numbers do not depend on."""
    words = ["python", "-m", "lpq", "compare", *context.params["recipes"]]
    for name, value in _given(context, FREE).items():
        if isinstance(value, bool):
            words.append(_flag(name) if value else f"--no-{_flag(name)[2:]}")
        else:
            for each in value if isinstance(value, list) else [value]:
                words += [_flag(name), str(each)]
    return shlex.join(words)


def _given(context: typer.Context, others: Container[str]) -> dict[str, Any]:
    """The options that stand in the command, but for ``others``."""
    sources = {name: context.get_parameter_source(name) for name in context.params if name not in others}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    return {name: context.params[name] for name in given}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _tell(out: Path, result: Any, other: str | None) -> None:
    """Print the table of the trainings in ``out``, and the table beside another recipe, and write these and the figure
    beside the trainings."""
    from lpq.cli.output import print_text
    from lpq.files.outputs import writable
    from lpq.registry.tables import table
    from lpq.train import beside, gaps, plot, trainings

    curves = trainings.read_all(out) if result is None else result
    trainings.refuse_mixed(curves, out)
    if not (rows := gaps.gaps(curves)):
        words = f"{out} has no training of a baseline that ended: there is nothing to compare with yet"
        if result is None:
            raise TrainError(f"{words}. Name recipes to train")
        print_text(words)
        return
    if other is not None and result is None:
        beside.check(other, (one.title for one in curves))
    cells = [row.cells()[:-1] for row in rows]
    table(f"Held-out loss, and the gap to {rows[0].title}", gaps.COLUMNS[:-1], cells)
    print_text(gaps.meaning_of(gaps.MEANINGS, cells, rows[0].title))
    tables = [gaps.markdown(curves)]
    if other is not None and (other_rows := beside.rows(curves, other)):
        table(f"Beside {other}", beside.columns(other), other_rows)
        print_text(beside.meaning(other_rows, other, rows[0].title))
        tables.append(beside.markdown(curves, other))
    elif other is not None:
        print_text(f"Beside {other}: no training by it ended yet")
    with writable(out / TABLE, "copy the curves to another --out") as file:
        file.write_text("\n\n".join(tables) + "\n", encoding="utf-8")
        figure = plot.draw(curves, out / FIGURE)
    print_text(f"written to {out}/: a file for each training, {TABLE}, {figure}")


def _options() -> list[inspect.Parameter]:
    own = {"context": typer.Context, "recipes": Recipes, "seeds": Seeds, "size": Size, "tokens": Tokens, "out": Out,
           "at_once": AtOnce, "time_limit": Limit, "beside": Beside}  # fmt: skip
    usual = {"seeds": 3, "out": Path("compare")}
    own_parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=usual.get(name), annotation=hint)
        for name, hint in own.items()
    ]
    return [*own_parameters, *parameters(SHARED, DEFAULTS)]


take(compare, *_options())
