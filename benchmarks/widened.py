"""Predicted times of the models of ``lpq compare``, on a GPU that multiplies the formats, as if the models were wide.

Layers so small gain no time, so times are predicted for layers ``WIDTH`` wide.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

import lpq
from lpq import registry
from lpq.bench.gpus import GPUS, predicted
from lpq.bench.layers import LayerSize
from lpq.recipes import Policy, Recipe
from lpq.recipes.gemms import GEMMS
from lpq.train.model import GPT, GPTShape

CARD, TOKENS, WIDTH = "b200", 16384, 4096
FOUR_BITS = ("nvfp4", "nvfp4-four-over-six")
FORMATS = ("bf16", "mxfp8", *FOUR_BITS)


def sizes(layers: int, heads: int, width: int) -> dict[str, LayerSize]:
    """The layers of a model by their names, as wide as if the model were ``WIDTH`` wide."""
    with torch.device("meta"):
        model = GPT(GPTShape(layers, heads, width))
    return {
        name: LayerSize(TOKENS, m.in_features * WIDTH // width, m.out_features * WIDTH // width)
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear)
    }


@lru_cache(None)
def seconds(size: LayerSize, recipe: Recipe | None) -> float:
    """The predicted seconds of a layer's step."""
    return predicted(GPUS[CARD], size, recipe)


def whole(layers: Mapping[str, LayerSize], policy: Policy | None) -> float:
    """The predicted seconds of all layers by a policy, in its first step; None: in bf16."""
    placed = None if policy is None else policy.placed(layers)
    return sum(seconds(size, placed and placed.schedule(name, 1).at(0)) for name, size in layers.items())


def speedup(settings: Mapping[str, Any], policy: Policy) -> float:
    """How many times as fast as in bf16 a policy is, for a model with the settings of a training."""
    layers = sizes(settings["layers"], settings["heads"], settings["width"])
    return whole(layers, None) / whole(layers, policy)


def uniform() -> dict[str, Policy]:
    """The recipes that come with lpq, each for all layers."""
    own = (plugin for plugin in registry.plugins() if plugin.builtin)
    return {name: lpq.policy(name) for plugin in own for name in plugin.recipes}


def composed(formats: Sequence[str]) -> dict[str, Policy]:
    """Every recipe that has each of its products in one of some formats, for all layers."""
    known = uniform()
    of: dict[str, Policy] = {}
    for three in itertools.product(formats, repeat=len(GEMMS)):
        parts = ", ".join(f"{product}={name}" for product, name in zip(GEMMS, three, strict=True))
        policy = lpq.policy(parts)
        of[next((name for name, recipe in known.items() if recipe == policy), parts)] = policy
    return of
