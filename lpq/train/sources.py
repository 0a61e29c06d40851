"""What a run trains by: ``--recipe`` takes a recipe, and a policy is given as ``--policy``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lpq
from lpq.core import QuantizedTensor
from lpq.nn import Linear
from lpq.recipes import RecipeError, toml

if TYPE_CHECKING:
    from torch import nn

    from lpq.recipes import Policy
    from lpq.train.config import TrainConfig


def policy_of(config: TrainConfig) -> Policy:
    """The policy of a run: the one that it names, or its recipe for all layers."""
    if config.policy is not None:
        return lpq.policy(config.policy)
    refuse_rules(config.recipe, f"give it as --policy {config.recipe}")
    return lpq.policy(lpq.recipe(config.recipe))


def refuse_rules(source: str, remedy: str) -> None:
    """An error if ``source`` is a policy's file where a recipe is wanted."""
    path = toml.path(source)
    if path is not None and "rules" in toml.read(path):
        raise RecipeError(f"{path} is a policy and not a recipe, since this file has rules: {remedy}")


def refuse_changes(model: nn.Module) -> None:
    """An error if the policy changes, in the course of the steps, what a stored weight is quantized with."""
    for name, layer in model.named_modules():
        if isinstance(layer, Linear) and isinstance(layer.weight, QuantizedTensor) and layer.schedule is not None:
            wanted = {recipe.w if recipe is not None else None for _, recipe in layer.schedule.pieces}
            if wanted != {layer.weight.quantizer}:
                raise RecipeError(
                    f"the weight of {name} is stored as {layer.weight.quantizer}, and the policy changes that: "
                    f"{layer.schedule}. Use --weights high-precision, or a policy that keeps it"
                )
