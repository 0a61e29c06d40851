"""Freezing: from reduced statistics to static ones, and into the layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor, nn

from lpq.calibration.collecting import histogram, tokens, upper_end
from lpq.calibration.errors import CalibrationError, CalibrationWarning
from lpq.calibration.statistics import Statistics
from lpq.calibration.targets import Target
from lpq.engines.siblings import fused
from lpq.nn import convert
from lpq.nn.names import plain_name
from lpq.nn.stateful_layer import StatefulLayer
from lpq.recipes import Recipe
from lpq.recipes.globs import exactly
from lpq.registry.showing import listed
from lpq.registry.warning import warn

Unseen = Literal["siblings", "error"]
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
LAST_NUMBER = re.compile(r"(?<=\.)\d+(?=\.\D*$)")
ALL_ZERO = 1.0
"""The statistic of a weight of zeros, which any scale is right for and none follows from."""


def clipped(statistics: Statistics, targets: Iterable[Target], percentile: float) -> dict[str, Tensor]:
    """For each layer, the smallest bf16 number that ``percentile`` percent of the magnitudes of its inputs do not
    exceed."""
    part = Fraction(str(percentile)) / 100
    limits = {}
    for target in targets:
        if histogram(target) in statistics:
            counts = statistics[histogram(target)]
            total = int(counts.sum())
            least = -(-part.numerator * total // part.denominator)
            number = int((counts.cumsum(0) < least).sum())
            limits[target.name] = torch.tensor(upper_end(number), dtype=torch.float32, device=counts.device)
    return limits


def frozen_values(
    statistics: Statistics, targets: Sequence[Target], groups: Sequence[Sequence[str]], unseen: Unseen
) -> dict[str, Tensor]:
    """The static statistics by name: layers that engines fuse share the larger statistics among them, and a layer that
    saw no input gets its siblings' statistics."""
    values: dict[str, Tensor] = {}
    for target in targets:
        for name in target.names("w"):
            value = _finite(name, statistics[name], "the weight has a NaN or an infinity")
            values[name] = torch.where(value > 0, value, ALL_ZERO)
        if int(statistics[tokens(target)]) if tokens(target) in statistics else 0:
            for name in target.names("x"):
                values[name] = _finite(
                    name, statistics[name],
                    "an input of the layer has a NaN or an infinity. Look at what goes through the model before it is "
                    "calibrated",
                )  # fmt: skip
    by_name = {target.name: target for target in targets}
    for names in fused(by_name, groups):
        together = [by_name[name] for name in names]
        for tensor in ("x", "w"):
            _share(values, together, tensor)
    _fill_unseen(values, targets, fused(by_name, groups), unseen)
    return values


def _finite(name: str, value: Tensor, otherwise: str) -> Tensor:
    if not bool(value.isfinite()):
        raise CalibrationError(f"{name} is {value.item()}: {otherwise}")
    return value


def _share(values: dict[str, Tensor], together: Sequence[Target], tensor: str) -> None:
    """Give layers that are encoded alike the largest of their statistics."""
    alike: dict[tuple[str, ...], list[Target]] = {}
    for target in together:
        own = (name.removeprefix(f"{target.name}.") for name in target.names(tensor))
        alike.setdefault((getattr(target.recipe, tensor).text, *own), []).append(target)
    for (_, *leaves), same in alike.items():
        for leaf in leaves:
            names = [name for target in same if (name := f"{target.name}.{leaf}") in values]
            own_values = [values[name] for name in names]
            values.update((name, torch.stack(own_values).amax()) for name in names)


def _fill_unseen(
    values: dict[str, Tensor], targets: Sequence[Target], together: Sequence[Sequence[str]], unseen: Unseen
) -> None:
    """Give layers that got no input, or nothing but zeros, the statistics of layers with the same input, or else of
    layers whose names differ in a number, such as other experts."""
    without = [
        target for target in targets if any(name not in values or not values[name] > 0 for name in target.names("x"))
    ]
    others = [target for target in targets if target not in without and target.names("x")]
    of = {name: [*names] for names in together for name in names}
    for target in without:
        alike = [t for t in others if t.recipe.x.text == target.recipe.x.text]
        same = [t for t in alike if t.name in of.get(target.name, ())]
        for place in (LAST_NUMBER, NUMBER):  # other experts of that block, or else of any
            same = same or [t for t in alike if place.sub("*", t.name) == place.sub("*", target.name)]
        if unseen == "error" or not same:
            why = "" if unseen == "error" else ", and no layer beside it or of its name in other experts did"
            raise CalibrationError(
                f"{target.name} saw no input but zeros{why}: pass batches that go through it, or keep it in high "
                "precision"
            )
        for name in target.names("x"):
            leaf = name.removeprefix(target.name)
            values[name] = torch.stack([values[t.name + leaf] for t in same]).amax()
    if without:
        names = [target.name for target in without]
        warn(
            f"no token went through {listed(names)}: their inputs get the static scales of their siblings",
            CalibrationWarning,
        )


@torch.no_grad()
def freeze(model: nn.Module, targets: Sequence[Target], values: Mapping[str, Tensor]) -> None:
    """Give layers their static recipes, and these the values."""
    _give_recipes(model, {target.layer: target.recipe for target in targets})
    for target in targets:
        for name, place in target.places().items():
            place.copy_(values[name])
        target.layer.passes.forget()


def _give_recipes(model: nn.Module, recipes: Mapping[nn.Module, Recipe]) -> None:
    """Convert the model again, so that its policy describes the recipes that it has."""
    rules: dict[Recipe, list[str]] = {}
    every = model.named_modules(remove_duplicate=False)
    layers = {name: module for name, module in every if isinstance(module, StatefulLayer)}
    for name, layer in layers.items():
        recipe = recipes.get(layer, layer.recipe)
        if recipe is not None:
            rules.setdefault(recipe, []).append(exactly(plain_name(name)))
    accumulate = next((layer.model.accumulate for layer in layers.values()), None)
    policy = {"rules": [{"match": names, "recipe": recipe} for recipe, names in rules.items()]}
    convert(model, policy, include="all", accumulate=accumulate)
