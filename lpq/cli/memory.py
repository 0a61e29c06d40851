"""``lpq memory``: what the weights of a real model shape take under a recipe, without allocating any of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated

import torch
import typer

import lpq
from lpq import observe
from lpq.cli.output import Json, as_json, print_text
from lpq.cli.shapes import SHAPES, ModelShape, Transformer
from lpq.nn.sharded_weights import Weights
from lpq.observe import Memory
from lpq.observe.footprint import BF16
from lpq.optim.adamw import FIRST, SECOND
from lpq.recipes import Recipe
from lpq.recipes.policy_sources import refuse_rules
from lpq.registry.errors import OptionError, suggestion
from lpq.registry.tables import table

Name = Annotated[str, typer.Argument(metavar="SHAPE", help=f"The shape of the model: {', '.join(SHAPES)}.")]
Source = Annotated[str, typer.Option("--recipe", help="The recipe of the blocks: a name, the grammar, or a TOML file.")]
First = Annotated[str, typer.Option("--exp-avg", help="The format of Adam's first moments; empty: they stay in fp32.")]
Second = Annotated[str, typer.Option("--exp-avg-sq", help="The format of Adam's second moments; empty: likewise.")]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="The number of ranks over which the model is sharded.")]

PLAIN = "bf16"
WAYS: dict[str, Weights | None] = {PLAIN: None, "gathered quantized": "high_precision", "stored quantized": "quantized"}
"""The columns of the table, and what each is to ``lpq.convert``; the first is a model that is not converted."""

ROWS: dict[str, Callable[[Memory], int]] = {
    "a rank: weights": lambda m: m.weights,
    "a rank: fp32 masters": lambda m: m.masters,
    "a rank: Adam's moments": lambda m: m.moments,
    "a rank: gradients": lambda m: m.gradients,
    "a rank: all of these": lambda m: m.total,
    "a rank: gathered at a time": lambda m: m.at_once,
    "whole: gathered in forward": lambda m: m.forward,
    "whole: gathered in backward": lambda m: m.backward,
}
UNITS = ("bytes", "KiB", "MiB", "GiB")


def memory(
    shape: Name = "llama-3-8b", recipe: Source = "nvfp4", ranks: Ranks = 8, exp_avg: First = "",
    exp_avg_sq: Second = "", json: Json = False,
) -> None:  # fmt: skip
    """Show how many bytes the weights of a model take under a recipe: stored, gathered, and in the optimizer.

    The model is built on the meta device in fp32, converted as `lpq.convert` does it, and its tensors are counted as
    FSDP2 shards them: each block, then the rest, which stays as it is; what is not quantized is gathered in bf16.
    """
    if shape not in SHAPES:
        other = "lpq.observe.memory counts your model"
        raise OptionError(f"there is no shape {shape!r}: {suggestion(shape, SHAPES)}; {other}")
    refuse_rules(recipe, "give the recipe of one of its rules")
    chosen = lpq.recipe(recipe)
    moments = {name: text for name, text in ((FIRST, exp_avg), (SECOND, exp_avg_sq)) if text}
    counts = {way: count_bytes(SHAPES[shape], chosen, weights, ranks, moments) for way, weights in WAYS.items()}
    if json:
        as_json({way: {**asdict(m), "total": m.total, "share": m.share} for way, m in counts.items()})
        return
    plain, *others = counts.values()
    unit, size = unit_for(plain.total)

    def cell(count: int, of: int) -> str:
        share = f"{count / of:5.0%}" if of else 5 * " "
        return f"{count / size:8.2f} {share}" if count else ""

    converted = max(m.converted for m in others)
    high = BF16 * converted
    rows = [("whole: the converted weights", *(cell(m.quantized or high, high) for m in counts.values()))]
    rows += [(row, *(cell(of(m), of(plain)) for m in counts.values())) for row, of in ROWS.items()]
    title = f"{shape} under {recipe}, {ranks} ranks; in {unit} and parts of bf16's (fp32 shards)"
    table(title, ("", *counts), rows)
    print_text(
        f"{plain.parameters:,} parameters; {converted:,} are converted: the blocks' linear layers, but for "
        f"weights that {ranks} ranks cannot cut into whole blocks."
    )
    for way, m in counts.items():
        if m.total > plain.total:
            of, bare = (f"{count / plain.total:.0%}" for count in (m.total, m.total - m.masters))
            print_text(
                f"{way}: a rank holds {of} of what it holds in bf16. Its fp32 masters take as much as the fp32 shards "
                f"of training in bf16, and the quantized weights, {m.share:.0%} of bf16, come on top: only the gathers "
                f"take less. With MasterWeights(…, keep=False), which keeps no masters, it is {bare}."
            )


def unit_for(count: int) -> tuple[str, int]:
    """The name and the bytes of the unit for a number of bytes and smaller ones."""
    power = min(int(math.log(max(count, 1), 1024)), len(UNITS) - 1)
    return UNITS[power], 1024**power


def count_bytes(
    shape: ModelShape, recipe: Recipe, weights: Weights | None, ranks: int, moments: Mapping[str, str]
) -> Memory:
    """Count the memory of a model of this shape that is converted so."""
    model = Transformer(shape)
    if weights is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the table shows how much is stored quantized, which may be nothing
            lpq.convert(model, {"rules": [{"match": "blocks.*", "recipe": recipe}]}, weights=weights, ranks=ranks)
    return observe.memory(model, ranks, blocks=model.blocks, param_dtype=torch.bfloat16, moments=moments)
