"""``lpq bench``: how much faster recipes are than bf16 here, for a map of sizes, your shapes or your model."""

from __future__ import annotations

import json as jsonlib
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track

import lpq
from lpq.bench import chart, machine
from lpq.bench.layers import LayerSize
from lpq.bench.native import FIRST, capability, encodes, native_products, to_begin_with
from lpq.bench.speedups import (
    Measured,
    cells,
    failures,
    in_figures,
    measure,
    milliseconds,
    ratio,
    recipes_of,
    squares,
    title,
    total,
)
from lpq.cli.doctor import Device
from lpq.cli.kernels import pick_device
from lpq.cli.models import NAMED, Chosen, ModelError, alike, convert, layer_sizes, left_out, on_meta
from lpq.cli.output import Json, as_json, print_text
from lpq.files.outputs import check_writable, writable
from lpq.kernels.table import allowed_backends
from lpq.recipes.policy_sources import refuse_rules
from lpq.registry.errors import OptionError
from lpq.registry.tables import table

NONE = "–"
DIGITS = 18
"""The most digits of a number that a tensor's size may have."""
FILES = ("bench.json", "bench.svg")
OTHER_OUT = "choose another --out"
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="M,K,N",
        help="A layer for M tokens, of K inputs and N outputs; repeatable.",
    ),
]
Model = Annotated[str, typer.Option("--model", help=f"The layers of a model: {NAMED}")]
TOKENS = 8192
Tokens = Annotated[
    int | None,
    typer.Option("--tokens", min=1, help="With --model: the tokens of a step on one device.", show_default=str(TOKENS)),
]
Recipes = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe", help="A recipe beside bf16; repeatable. Default: the recipes whose codes this GPU multiplies."
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIRECTORY", help="Where to write bench.json, and of the map bench.svg.")
]


def bench(
    shape: Shapes = None,
    model: Model = "",
    tokens: Tokens = None,
    chosen: Chosen = None,
    recipe: Recipes = None,
    device: Device = "auto",
    out: Out = None,
    json: Json = False,
) -> None:
    """Time linear layers, forward and backward, in bf16 and by recipes, on this machine.

    Without --shape and --model: a map of how many times as fast as bf16 a recipe is, by tokens and width. Layers run
    by themselves and without torch.compile; a size whose time is the host's gains from larger batches, and from
    compiling the model. On a CPU the times are of emulation, and say nothing of a GPU.
    """
    if shape and model:
        raise OptionError("--shape and --model: give one of them")
    for option, value in (("--tokens", tokens), ("--experts-per-token", chosen)):
        if value is not None and not model:
            raise OptionError(f"{option} {value} is for the layers of --model: name a model, or leave it out")
    tokens = tokens or TOKENS
    if out is not None:
        for name in FILES:
            check_writable(out / name, OTHER_OUT)
    where = pick_device(device)
    allowed_backends()  # a misspelt one is refused before anything is timed
    sm = capability(where)
    recipes = tuple(recipe or to_begin_with(sm) or FIRST[:1])
    for text in recipes:
        refuse_rules(text, "give the recipe of one of its rules")
        lpq.recipe(text)
    counts = dict.fromkeys(map(_size, shape or ()), 1)
    names: dict[LayerSize, list[str]] = {}
    unknown: str | None = None
    if model:
        convert(built := on_meta(model, "--model"), recipes[0], "--model")  # `lpq advise` tells what is left out
        layers = layer_sizes(built, tokens, chosen)
        unknown = left_out(layers)
        for group in alike(layers):
            for size in group.size:
                counts[size] = counts.get(size, 0) + len(group.names)
                names.setdefault(size, []).append(group.title)
        if layers and not counts:
            raise OptionError(str(unknown))
        if not counts:
            raise ModelError(f"--model {model}: lpq.convert reaches no linear layer of it, so that none can be timed")
    sizes = list(counts) or squares(where)
    quiet = json or not sys.stderr.isatty()
    with torch.cuda.device(where) if where.type == "cuda" else nullcontext():
        steps = measure(sizes, recipes, where)
        rows = track(steps, "Timing", len(sizes), console=Console(stderr=True), transient=True, disable=quiet)
        shapes = list(rows)
    environment = machine.record(_command(shape or (), model, tokens, chosen, device, recipe or ()), where)
    result: dict[str, Any] = {
        "part": "layers" if counts else "map",
        "environment": environment,
        "native": {text: native_products(lpq.recipe(text), sm) for text in recipes},
        "shapes": shapes,
    }
    heading = title(environment)
    if out is not None:
        _write(out, result, None if counts else chart.svg(shapes, heading))
    if json:
        as_json(result)
        return
    if counts:
        _show_layers(shapes, recipes, counts, names, heading)
    else:
        for text in recipes_of(shapes):
            table(f"{text}: {heading}", *cells(shapes, text))
    for text in failures(shapes):
        typer.echo(f"lpq: {text}", err=True)
    for sentence in [*_remarks(result["native"], where), *([unknown] if unknown else [])]:
        print_text(sentence)
    if out is not None:
        print_text(f"written to {out}/: {' and '.join(FILES[: 1 if counts else 2])}")


def _command(
    shapes: Sequence[str], model: str, tokens: int, chosen: int | None, device: str, recipes: Sequence[str]
) -> str:
    """The command that measures the same once more."""
    arguments = [part for text in shapes for part in ("--shape", text)]
    arguments += ["--model", model, "--tokens", str(tokens)] if model else []
    arguments += ["--experts-per-token", str(chosen)] if chosen else []
    arguments += ["--device", device] if device != "auto" else []
    return shlex.join(["lpq", "bench", *arguments, *(part for text in recipes for part in ("--recipe", text))])


def _size(text: str) -> LayerSize:
    numbers = [n.strip() for n in text.split(",")]
    if len(numbers) != 3 or not all(n.isdecimal() and len(n) <= DIGITS and int(n) for n in numbers):
        raise OptionError(f"--shape {text}: it is not M,K,N, such as 8192,4096,14336: tokens, inputs and outputs")
    return LayerSize(*map(int, numbers))


def _show_layers(
    shapes: Sequence[Measured],
    recipes: Sequence[str],
    counts: dict[LayerSize, int],
    names: dict[LayerSize, list[str]],
    heading: str,
) -> None:
    """A row for each size, and for a model one for all its layers."""
    rows = []
    for size, measured in zip(counts, shapes, strict=True):
        times = [milliseconds(measured, text) for text in (None, *recipes)]
        rows.append((str(size), "\n".join(names.get(size, ())), str(counts[size]) if names else "", *_cells(times)))
    if names:
        times = [total(zip(shapes, counts.values(), strict=True), text) for text in (None, *recipes)]
        rows.append(("all of them", "", str(sum(counts.values())), *_cells(times)))
    table(f"Milliseconds, and {heading}", ("tokens x inputs x outputs", "layers", "count", "bf16", *recipes), rows)


def _cells(times: Sequence[float | None]) -> list[str]:
    first, *others = (NONE if ms is None else f"{ms:.2f}" for ms in times)
    return [first, *(f"{cell} ({in_figures(ratio(times[0], ms))})" for cell, ms in zip(others, times[1:], strict=True))]


def _remarks(native: dict[str, list[str]], where: torch.device) -> list[str]:
    if where.type == "cpu":
        return ["These are times of emulation: a CPU multiplies no such codes. They say nothing of a GPU."]
    others = "in bf16, which saves bytes and no time"
    return [
        f"{text}: this GPU multiplies {', '.join(products)} as codes, and the rest {others}."
        if products
        else f"{text}: this GPU multiplies none of its products as codes, but all {others}."
        for text, products in native.items()
        if len(products) < 3 and encodes(lpq.recipe(text))
    ]


def _write(folder: Path, result: dict[str, Any], svg: str | None) -> None:
    for name, text in zip(FILES, (jsonlib.dumps(result, indent=1) + "\n", svg), strict=True):
        if text is not None:
            with writable(folder / name, OTHER_OUT) as file:
                file.write_text(text, encoding="utf-8")
