"""Layers of several sizes, each timed in bf16 and by recipes in turn; and the map of how much faster recipes are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from lpq.bench.contenders import BASELINE, by_recipes, in_words, label, plain
from lpq.bench.layers import Layers, LayerSize
from lpq.bench.timing import in_turn

TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
WIDTHS = (1024, 2048, 4096, 8192, 16384)
ON_CPU = ((64, 128, 256), (64, 128, 256))
"""Tokens and widths that a CPU, which emulates all formats, gets through in seconds."""

Measured = dict[str, Any]
"""A size, and under ``results`` a row for each contender, as stored results have it."""


def squares(device: torch.device) -> list[LayerSize]:
    """The sizes of the map: square layers, each with a number of tokens."""
    tokens, widths = (TOKENS, WIDTHS) if device.type == "cuda" else ON_CPU
    return [LayerSize(count, width, width) for count in tokens for width in widths]


def measure(sizes: Sequence[LayerSize], recipes: tuple[str, ...], device: torch.device) -> Iterator[Measured]:
    """Time a layer of each size, forward and backward; what fails is a result, too."""
    everyone = [*plain(), *by_recipes(recipes)]
    for size in sizes:
        try:
            layers = Layers(everyone, size, device)
            failures, timings = layers.failures, in_turn(layers.steps(), device)
        except RuntimeError as error:  # of what all share, as where it has no place in memory
            failures, timings = dict.fromkeys((c.name for c in everyone), in_words(error)), {}
        yield {
            **asdict(size),
            "results": [
                {
                    **c.record(),
                    **(timings[c.name].record("ms") if c.name in timings else {}),
                    "failure": failures.get(c.name),
                }
                for c in everyone
            ],
        }


def milliseconds(measured: Measured, recipe: str | None) -> float | None:
    """The time by a recipe, or in bf16 (None); None if it failed."""
    name = BASELINE if recipe is None else label("lpq", recipe, False)
    rows = {label(row["library"], row["recipe"], row["compiled"]): row for row in measured["results"]}
    time: float | None = rows[name].get("ms")
    return time


def total(counts: Iterable[tuple[Measured, int]], recipe: str | None) -> float | None:
    """The time of layers together, each counted as often as it says; None if one of them failed."""
    times = [(milliseconds(measured, recipe), count) for measured, count in counts]
    parts = [ms * count for ms, count in times if ms is not None]
    return sum(parts) if len(parts) == len(times) else None


def speedup(measured: Measured, recipe: str) -> float | None:
    """How many times as fast as bf16 a recipe is; None if one of the two failed."""
    return ratio(milliseconds(measured, None), milliseconds(measured, recipe))


def ratio(plain: float | None, quantized: float | None) -> float | None:
    """One time over another; None if one of the two failed."""
    return plain / quantized if plain and quantized else None


def recipes_of(shapes: Sequence[Measured]) -> list[str]:
    """The recipes that were measured."""
    return [row["recipe"] for row in shapes[0]["results"] if row["library"] == "lpq"]


def grid(shapes: Sequence[Measured], recipe: str) -> tuple[list[int], list[int], list[list[float | None]]]:
    """The tokens, the widths, and a row of speed-ups for each number of tokens."""
    gains = {(s["tokens"], s["inputs"]): speedup(s, recipe) for s in shapes}
    tokens, widths = (sorted({key[i] for key in gains}) for i in (0, 1))
    return tokens, widths, [[gains.get((count, width)) for width in widths] for count in tokens]


def cells(shapes: Sequence[Measured], recipe: str) -> tuple[list[str], list[list[str]]]:
    """The map of a recipe as text: the heads of its columns, and its rows."""
    tokens, widths, values = grid(shapes, recipe)
    rows = [[f"{count:,}", *map(in_figures, row)] for count, row in zip(tokens, values, strict=True)]
    return ["tokens, by width:", *(f"{width:,}" for width in widths)], rows


def in_figures(ratio: float | None) -> str:
    """A speed-up, or a dash for what was not measured."""
    return "–" if ratio is None else f"{ratio:.2f}"


def title(environment: dict[str, Any]) -> str:
    """The unit of the map, and where it was measured."""
    return f"times as fast as bf16, forward and backward; {environment['device']}, torch {environment['torch']}"


def failures(shapes: Sequence[Measured]) -> list[str]:
    """List the failures, each once."""
    texts = (
        f"{label(row['library'], row['recipe'], row['compiled'])}: {row['failure']}"
        for shape in shapes
        for row in shape["results"]
        if row["failure"] is not None
    )
    return [*dict.fromkeys(texts)]
