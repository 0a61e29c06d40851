"""Errors of the products of a layer whose input has a mean, with and without the mean split: the table of the README.

Run it where lpq and this plugin are installed: ``python evidence.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import lpq
from lpq.nn import Linear

TOKENS, INPUTS, OUTPUTS = 2048, 1024, 1024
SHARE = 0.24
"""The part of the energy of the input that its mean has."""
SEEDS = 4
RECIPES = {
    "`nvfp4`": "x=nvfp4(rht=true), w=nvfp4(block=16x16), dy=nvfp4(rht=true, stochastic=true)",
    "`mean_split`": "mean_split",
    "`nvfp4`, `dy` rounded to nearest, no rotation": "x=nvfp4(), w=nvfp4(block=16x16), dy=nvfp4()",
    "`mean_split`, `dy` rounded to nearest": "x=mean_split(rest=nvfp4), w=nvfp4(block=16x16), dy=nvfp4()",
}


def error(got: Tensor, wanted: Tensor) -> float:
    """The relative squared error."""
    return ((got - wanted).square().mean() / wanted.square().mean()).item()


def products(layer: nn.Linear, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of the weight."""
    y = layer(x)
    (dw,) = torch.autograd.grad(y, layer.weight, dy)
    return y.detach(), dw


def errors(recipe: str, seed: int, converted: bool = True) -> tuple[float, float]:
    """The errors of both under a recipe. ``converted=False``: the format without the plugin's layer."""
    torch.manual_seed(seed)
    mean = torch.randn(INPUTS) * (SHARE / (1 - SHARE)) ** 0.5
    x, dy = torch.randn(TOKENS, INPUTS) + mean, torch.randn(TOKENS, OUTPUTS)
    exact = nn.Linear(INPUTS, OUTPUTS, bias=False)
    wanted = products(exact, x, dy)
    if converted:
        layer = nn.Linear(INPUTS, OUTPUTS, bias=False)
        layer = lpq.convert(nn.Sequential(layer), recipe)[0]
    else:
        layer = Linear(INPUTS, OUTPUTS, bias=False, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(exact.weight)
    y, dw = products(layer, x, dy)
    return error(y, wanted[0]), error(dw, wanted[1])


def table() -> dict[str, tuple[float, float]]:
    """The mean errors over the seeds, by the names of the rows."""
    cases = [(name, recipe, True) for name, recipe in RECIPES.items()]
    cases.append(("the format without the layer", cases[-1][1], False))
    found = {}
    for name, recipe, converted in cases:
        each = [errors(recipe, seed, converted) for seed in range(SEEDS)]
        found[name] = sum(y for y, _ in each) / SEEDS, sum(dw for _, dw in each) / SEEDS
    return found


if __name__ == "__main__":
    print("| recipe | output | gradient of the weight |\n|---|---|---|")
    for name, (y, dw) in table().items():
        print(f"| {name} | {y:.4f} | {dw:.4f} |")
