"""The layer that multiplies the mean of its input by the weight in high precision."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lpq.core import QuantizedTensor
from lpq.nn import Linear
from lpq_mean_split.format import MeanSplitQuantizer

if TYPE_CHECKING:
    from lpq.nn.plan import Plan
    from lpq.recipes import Recipe


def rest_of(recipe: Recipe | None) -> Recipe | None:
    """The recipe of what is left without the mean; None: this recipe does not split x."""
    if recipe is None:
        return None
    row, col = recipe.fprop.a, recipe.wgrad.b
    if not isinstance(row, MeanSplitQuantizer) or not isinstance(col, MeanSplitQuantizer):
        return None
    return replace(recipe, fprop=replace(recipe.fprop, a=row.rest), wgrad=replace(recipe.wgrad, b=col.rest))


class MeanSplitLinear(Linear):
    """``y = (x - m) Wᵀ + m Wᵀ + b`` with the mean ``m`` of all tokens: the first product is quantized, the second is
    not. To autograd ``m`` is a constant, so the gradient of ``x`` comes from the first product alone.

    Under a recipe that splits no input it is an ``lpq.nn.Linear``.
    """

    splits = False

    def planned(self, recipe: Recipe | None) -> Plan | None:
        return super().planned(rest_of(recipe) or recipe)

    def take_recipe(self, recipe: Recipe | None) -> None:
        super().take_recipe(recipe)
        self.splits = rest_of(recipe) is not None

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        if not self.splits:
            return super().forward(input)
        weight = self.weight
        if (why := self._why_not(input, weight)) is not None:
            raise ValueError(f"{self.title}: mean_split cannot split the mean off: {why}")
        tokens = input.detach().reshape(-1, input.shape[-1])
        count = max(tokens.shape[0], 1)  # the mean of no token is 0
        mean = (tokens.sum(0, dtype=torch.float32) / count).to(input.dtype)
        y = super().forward(input - mean)
        return y + nn.functional.linear(mean.to(weight.dtype), weight).to(y.dtype)

    def _why_not(self, input: Tensor, weight: Tensor) -> str | None:
        """Why this pass cannot be; None: it can."""
        if self.gather is not None or isinstance(weight, QuantizedTensor):
            return "the mean is multiplied by the weight in high precision: call lpq.convert without weights="
        if self.layouts is not None or hasattr(weight, "device_mesh"):
            return "its weight is divided over ranks, by tensor parallelism: give this layer another recipe"
        if self.model.accumulate is not None:
            return "its weight has a gradient of two products: call lpq.convert without accumulate="
        if isinstance(input, QuantizedTensor):
            return "its input is encoded already: give it the tensor in high precision"
        return None


def converted(module: nn.Module, name: str, recipe: Recipe) -> nn.Module | None:
    """Turn an ``nn.Linear`` into a ``MeanSplitLinear``, if the recipe splits its input."""
    if type(module) is nn.Linear and "forward" not in vars(module) and rest_of(recipe) is not None:
        return MeanSplitLinear.adopt(module, recipe)
    return None
