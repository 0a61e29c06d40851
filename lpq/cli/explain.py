"""``lpq explain RECIPE``: what the three products of a recipe multiply, and what runs them here."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer

import lpq
from lpq.cli.doctor import Device
from lpq.cli.kernels import Served, pick_device, served, show
from lpq.cli.output import Json, as_json, print_text
from lpq.formats.format import DIRECTIONS, Quantizer
from lpq.kernels.table import allowed_backends
from lpq.nn.layer_notes import expert_note
from lpq.recipes import Recipe
from lpq.recipes.gemms import GEMMS, OPERANDS, TENSORS
from lpq.recipes.policy_sources import refuse_rules
from lpq.registry.tables import table

PRODUCTS = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}
EXPERTS = [(14336, 4096), (1408, 2048)]
"""Outputs and features of large and of small experts, as models have them."""
Source = Annotated[str, typer.Argument(metavar="RECIPE", help="A name, the grammar, or a TOML file.")]

Full = Annotated[bool, typer.Option("--full", help="A row for each step, and a reason for each kernel.")]


def explain(recipe: Source, device: Device = "auto", full: Full = False, json: Json = False) -> None:
    """Show what a recipe does: the operands of its three products, their quantizers, and what runs each.

    A kernel that would be better and cannot run here is listed with the reason. The exit status is 1 where a step
    cannot run, because LPQ_KERNELS leaves no kernel for it.
    """
    refuse_rules(recipe, f"it is for `lpq train --policy {recipe}`; explain the recipe of one of its rules")
    chosen, where = lpq.recipe(recipe), pick_device(device)
    allowed_backends()  # a misspelt one is refused once, and not beside every operation
    gemms = {gemm: described(chosen, gemm) for gemm in GEMMS}
    runs: dict[str, Served] = {gemm: served("gemm", product, where) for gemm, product in chosen.products.items()}
    for tensor in TENSORS:
        runs |= encoding(chosen, tensor, where)
    if json:
        as_json(
            {
                "recipe": chosen.text,
                "name": chosen.name,
                "device": str(where),
                "gemms": gemms,
                "runs": {name: s.plain() for name, s in runs.items()},
                "experts": expert_note(chosen, EXPERTS),
            }
        )
    else:
        table(
            f"{chosen.title}  =  {chosen.text}" if chosen.name else chosen.text,
            ("product", "computes", "operands"),
            (
                (gemm, f"{PRODUCTS[gemm]} = {' · '.join(operands)}", " · ".join(operands.values()))
                for gemm, operands in gemms.items()
            ),
        )
        show(f"What runs on {where}", ("step",), [((name,), s) for name, s in runs.items()], full=full)
        print_text(f"Experts: {expert_note(chosen, EXPERTS)}")
    if any(step.error is not None for step in runs.values()):
        raise typer.Exit(1)


def described(recipe: Recipe, gemm: str) -> dict[str, Any]:
    """The operands of one product, in order, and the quantizer of each."""
    names = (f"{operand.tensor}.{operand.side}" for operand in OPERANDS if operand.gemm == gemm)
    return {name: side.text for name, side in zip(names, recipe.products[gemm], strict=True)}


def encoding(recipe: Recipe, tensor: str, device: torch.device) -> dict[str, Served]:
    """The kernels that encode a tensor: one step for both operands where one read can make them."""
    quantizer: Quantizer = getattr(recipe, tensor)
    sides = {f"{tensor}.{side}": quantizer.side(side) for side in DIRECTIONS}
    real = {name: side for name, side in sides.items() if not side.plain}
    if not real or quantizer.col_source == "row":
        return {f"quantize {name}": served("quantize", (side,), device) for name, side in sides.items()}
    return {f"quantize {', '.join(real)}": served("quantize", tuple(real.values()), device)}
