"""The form that a model's weights will have once it is converted, which files are compared with before it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from lpq import recipes, registry
from lpq.checkpoint.errors import CheckpointError
from lpq.checkpoint.model import Model
from lpq.engines.reading import Quantized
from lpq.formats import Quantizer
from lpq.nn import Layer
from lpq.nn.conversion_plan import ConversionPlan, rule_names
from lpq.nn.expert_stacks import ExpertStack
from lpq.nn.names import plain_name
from lpq.nn.sharded_weights import Weights, owners_of
from lpq.nn.stateful_layer import StatefulLayer
from lpq.recipes import PolicyLike, Recipe
from lpq.recipes.globs import exactly, matches, numberless
from lpq.registry.errors import LpqError
from lpq.tensor import QuantizedTensor
from lpq.torch_private.tensors import local_part


@dataclass(frozen=True)
class Intended:
    """The recipes and the stored weights of a model that is to be loaded."""

    recipes: Mapping[str, Recipe]
    """The recipe of each module that has one, by name."""
    stored: Mapping[str, Quantizer]
    """The quantizer of the row operand of each weight that is stored quantized, by the name of the parameter."""
    names: Mapping[str, Sequence[str]]
    """All names of each module, by the first one."""
    experts: tuple[ExpertStack, ...] = ()
    """The stacks of Hugging Face's experts that are stored quantized, which ``lpq.convert`` does not do."""

    @classmethod
    def of(
        cls, model: Model, rules: PolicyLike | None, weights: Weights | None, stacks: Mapping[str, ExpertStack]
    ) -> Intended:
        """The model after ``lpq.convert(model, rules, weights=weights)``; with ``rules=None`` the model itself."""
        module = model.module
        tensors = model.tensors()
        stored = {name: side for name, tensor in tensors.items() if (side := stored_side(name, tensor)) is not None}
        modules = {plain_name(name): module for name, module in module.named_modules()}
        names = rule_names(module)
        if rules is None:
            present = {n: m.recipe for n, m in modules.items() if isinstance(m, StatefulLayer) and m.recipe is not None}
            return cls(present, stored, names)
        schedules = ConversionPlan.of(module, recipes.policy(rules)).schedules
        by_name = {plain_name(name): recipe for name, s in schedules.items() if (recipe := s.at(0)) is not None}
        experts: list[ExpertStack] = []
        if weights == "quantized":
            linear = [name for name in by_name if type(modules[name]) is nn.Linear or isinstance(modules[name], Layer)]
            owners = {f"{name}.weight".lstrip("."): name for name in linear}
            owners |= {one.name: one.holder_name for one in stacks.values() if one.holder_name in by_name}
            times = owners_of(module)
            for weight, name in owners.items():
                side = by_name[name].w.side("row")
                if weight not in stored and not side.plain and times[id(tensors.get(weight))] == 1:
                    stored[weight] = side
            for stack in stacks.values():
                recipe = by_name.get(stack.holder_name) if stack.key else None
                if recipe is not None and type(stack.weight) is nn.Parameter:
                    row, col = recipe.w.side("row"), recipe.w.side("col")
                    if not (row.plain or row.static or col.static):
                        experts.append(stack)
        return cls(by_name, stored, names, tuple(experts))

    def fitting(self, layers: Mapping[str, Quantized]) -> str:
        """A policy that stores weights as these layers of the files, by the names of modules, have them."""
        rules: dict[str, list[str]] = {}
        for name, layer in layers.items():
            if (recipe := self.recipes.get(name)) is not None:
                rules.setdefault(_with_weight(recipe, layer).text, []).extend(self.names.get(name, [name]))
        every = {alias for own in self.names.values() for alias in own}
        listing = [{"match": _patterns(own, every - {*own}), "recipe": text} for text, own in rules.items()]
        return f"policy={{'rules': {listing}}}"


def stored_side(name: str, tensor: Tensor) -> Quantizer | None:
    """The quantizer of the row operand of a weight; None: it is not stored quantized."""
    local = local_part(tensor)
    if not isinstance(local, QuantizedTensor):
        return None
    if local.row is None:
        raise CheckpointError(f"{name} is stored without its row operand, which engines multiply")
    return local.row.quantizer


def recipe_of(layer: Quantized) -> Recipe:
    """A recipe whose forward computes as engines do with such a layer; backward is in bf16, of the decoded weight."""
    x: Any = registry.quantizer(layer.inputs.quantizer) if layer.inputs is not None else "bf16"
    high = {"dgrad": "bf16", "wgrad": "bf16"}
    w = recipes.recipe({"fprop": {"x": x, "w": registry.quantizer(layer.scheme.quantizer)}, **high}).w
    derived: Any = registry.quantizer(str(replace(cast("Any", w), col_source="row")))
    return recipes.recipe({"fprop": {"x": x, "w": derived}, "dgrad": {"dy": "bf16", "w": derived}, "wgrad": "bf16"})


def _with_weight(recipe: Recipe, layer: Quantized) -> Recipe:
    """The recipe, with the quantizer of a layer's weight in the files; if its products cannot be multiplied then, the
    recipe of an engine."""
    w = registry.quantizer(layer.scheme.quantizer)
    quantizers = {str(o): w if o.tensor == "w" and not q.plain else q for o, q in recipe.operands.items()}
    try:
        return recipes.recipe(quantizers)
    except LpqError:
        return recipe_of(layer)


def _patterns(names: Sequence[str], others: Iterable[str]) -> list[str]:
    """Patterns for these names and no others: without the numbers of blocks, if that is possible."""
    short = [*dict.fromkeys(numberless(exactly(name)) for name in names)]
    return [*map(exactly, names)] if any(matches(pattern, name) for pattern in short for name in others) else short
