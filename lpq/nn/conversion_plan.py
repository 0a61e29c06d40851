"""The plan of a conversion: what becomes of each module of a model, decided and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lpq import registry
from lpq.nn.coverage import matrices
from lpq.nn.exclusions import convertible, exclusions
from lpq.nn.functional import why_not_in_groups
from lpq.nn.fused_experts import FusedExperts, TransposedExperts, holds_experts, is_transposed, stacks
from lpq.nn.linear import Layer, Linear, weight_of
from lpq.nn.names import plain_name
from lpq.nn.plan import Plan, check_names
from lpq.nn.reports import Entry
from lpq.nn.stateful_layer import StatefulLayer
from lpq.nn.transposed import TransposedLayer, holds_transposed
from lpq.nn.wanted import Accumulate
from lpq.operations.inputs import DTYPES
from lpq.recipes import Policy, Recipe, RecipeError, Schedule, Steps
from lpq.registry.errors import LpqError
from lpq.torch_private.hooks import has_hooks, hooks_of

TAKEN = "lpq_recipe"
"""An attribute of modules that a plugin made: the title of the recipe that each was made for."""
BECAME = "; it is a "
"""The beginning of the end of a note: the class of the module that a plugin made."""
LEFT_ALONE = Schedule(((None, None),))


@dataclass(frozen=True)
class ConversionPlan:
    """The recipes that a policy gives to the modules of a model."""

    names: Mapping[str, list[str]]
    """All names of each module, by the first one."""
    without: Mapping[str, str]
    """The modules that are left out, by name, and why."""
    schedules: Mapping[str, Schedule]
    """The recipes of each module."""
    policy: Policy
    """The policy, with places of blocks as their numbers in this model."""

    @classmethod
    def of(cls, model: nn.Module, policy: Policy, steps: Steps = None) -> ConversionPlan:
        """Plan the conversion of a model by a policy."""
        names = names_of(model)
        policy = policy.placed(plain_name(alias) for aliases in names.values() for alias in aliases)
        without = exclusions(model, names, policy)
        schedules = {n: LEFT_ALONE if n in without else _schedule(policy, own, steps) for n, own in names.items()}
        return cls(names, without, schedules, policy)


def names_of(model: nn.Module) -> dict[str, list[str]]:
    """Every module's first name, and all its names: a module may be in several places."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(first.setdefault(id(module), name), []).append(name)
    return names


def rule_names(model: nn.Module, within: str = "") -> dict[str, list[str]]:
    """All names by which rules know each module, by the first one. ``within``: the model's own name, if it has one."""
    every = ([plain_name(f"{within}.{alias}").strip(".") for alias in aliases] for aliases in names_of(model).values())
    return {names[0]: names for names in every}


def _schedule(policy: Policy, aliases: list[str], steps: Steps) -> Schedule:
    first, *others = map(plain_name, aliases)
    schedule = policy.schedule(first, steps)
    for other in others:
        if policy.schedule(other, steps) != schedule:
            raise RecipeError(
                f"{first!r} and {other!r} are one and the same module, and the policy gives them different recipes: "
                f"{schedule}; {policy.schedule(other, steps)}. Have one rule match both"
            )
    return schedule


def check_layers(
    modules: Mapping[str, nn.Module], schedules: Mapping[str, Schedule], accumulate: Accumulate | None = None
) -> None:
    """Refuse what layers cannot be given, at this step or a later one."""
    for name, module in modules.items():
        planned = {recipe for _, recipe in schedules[name].pieces if recipe is not None}
        holds = holds_experts(module)
        if not planned or not (holds or convertible(module)):
            continue
        transposed = is_transposed(module) if holds else holds_transposed(module) or isinstance(module, TransposedLayer)
        if accumulate is not None and transposed:
            raise ValueError(
                f"accumulate={accumulate!r} is for weights of [out, in], and the weight of {name or 'the layer'} "
                f"({type(module).__name__}) is [in, out]: leave accumulate out, or have the policy give it no recipe"
            )
        weights: Mapping[str, Any] = stacks(module) if holds else {"weight": weight_of(module)}
        for key, weight in weights.items():
            if weight.dtype not in DTYPES:
                raise TypeError(
                    f"{name or 'the layer'}: its {key} is {weight.dtype}; float32, bfloat16 and float16 can be "
                    "encoded: cast the model first, or have the policy give this layer no recipe"
                )
        own = module.memories() if isinstance(module, StatefulLayer) else ()
        why_unfit = why_not_in_groups if holds else getattr(module, "why_unfit", None)
        for recipe in planned:
            if why_unfit is not None and (why := why_unfit(Plan.of(recipe))) is not None:
                raise RecipeError(f"{name or 'the layer'} cannot have the recipe {recipe.title}: {why}")
            check_names(module, recipe, own, name or "the layer")


# ------------------------------------------------------------------------------ what becomes of each module


@dataclass(frozen=True)
class Change:
    """A module, and the module that it becomes."""

    name: str
    module: nn.Module
    schedule: Schedule
    new: nn.Module
    """The module in its place; often itself."""
    kind: type[StatefulLayer] | None = None
    """The class of lpq that it gets, if lpq converts it."""
    made_for: Recipe | None = None
    """The recipe for which a plugin made it, if one did."""
    layers: Mapping[str, StatefulLayer] = field(default_factory=dict)
    """The layers of lpq in it, by name, that follow the schedule."""

    def apply(self) -> None:
        """Give layers their recipe, whatever made them."""
        recipe, layers = self.schedule.at(0), {**self.layers}
        if self.new.training != self.module.training:
            self.new.train(self.module.training)
        if self.kind is not None:
            layers[self.name] = self.kind.adopt(self.new, recipe)
        elif self.made_for is not None and not isinstance(self.new, StatefulLayer):
            vars(self.new)[TAKEN] = self.made_for.title
        for name, layer in layers.items():
            layer.qualified_name, layer.schedule = name, self.schedule
            layer.take_recipe(recipe)


def changes_of(model: nn.Module, plan: ConversionPlan) -> tuple[list[Change], list[Entry], list[Entry]]:
    """Have plugins make the modules that they convert, and change nothing. Return the changes, the entries of modules
    that are converted, and the entries of other modules with parameters of their own."""
    changes: list[Change] = []
    converted: list[Entry] = []
    others: list[Entry] = []
    registry.plugins()  # which takes in those that were installed since
    for name, schedule in plan.schedules.items():
        if converted and name.startswith(f"{converted[-1].name}."):
            continue  # inside a module that a plugin took as a whole: the layers inside follow it
        module = model.get_submodule(name)
        kind = module.kind.rpartition(".")[2] if isinstance(module, StatefulLayer) else type(module).__name__
        change, note = _change_of(module, name, schedule)
        changes += [change] if change is not None else []
        if change is not None and note:
            converted.append(Entry(name, kind, note))
            if not name:
                break  # which is the whole model
        elif next(module.parameters(recurse=False), None) is not None:
            others.append(Entry(name, kind, plan.without.get(name) or note or plan.policy.why_none(plain_name(name))))
    return changes, converted, others


def _change_of(module: nn.Module, name: str, schedule: Schedule) -> tuple[Change | None, str]:
    """Return the change of a module, if it has one; and its recipes, or why they do not reach it: "" without any."""
    first = next((recipe for _, recipe in schedule.pieces if recipe is not None), None)
    note = str(schedule) if first is not None else ""
    if isinstance(module, StatefulLayer):
        return Change(name, module, schedule, module, layers={name: module}), note
    if first is None:
        return None, note
    was = type(module)
    new: nn.Module | None = registry.convert_module(module, name, first)
    if new is None:
        if (kind := _kind_of(module)) is not None:
            if (why := _why_left(module)) is not None:
                return None, why
            kind.check_names(module, name or "the layer")
            return Change(name, module, schedule, module, kind), note
        if isinstance(module, nn.Linear):
            return None, "a subclass of nn.Linear, whose forward may be its own"
        if TAKEN in vars(module):
            return None, f"a plugin made it for {vars(module)[TAKEN]}, and none converts it again"
        own = ", ".join(key for key, _ in matrices(module)) if next(module.children(), None) is not None else ""
        return None, f"no plugin converts {type(module).__name__}{own and f', which holds {own} beside other modules'}"
    if not isinstance(new, nn.Module):
        raise LpqError(
            f"a plugin's lpq_convert_module returned {new!r} for {name or 'the model'} ({type(module).__name__}), and "
            "that is no torch.nn.Module: have it return the converted module, or None (`lpq plugins` lists the plugins)"
        )
    if has_hooks(module) and hooks_of(module) != hooks_of(new) and all(m is not module for m in new.modules()):
        raise ValueError(f"{name or 'the model'}: a plugin replaces it and its hooks: add them after lpq.convert")
    if isinstance(new, StatefulLayer):
        return Change(name, module, schedule, new, made_for=first, layers={name: new}), note
    layers = {
        f"{name}.{inner}".strip("."): layer
        for inner, layer in new.named_modules()
        if isinstance(layer, Layer) and layer.recipe == first and not layer.schedule
    }
    if not layers and len(schedule.pieces) > 1:
        note = f"{first.title}, and nothing later: there is no lpq.nn.Linear of that recipe inside to follow the policy"
    if type(new) is not was:
        note += f"{BECAME}{type(new).__module__}.{type(new).__qualname__} now"
    return Change(name, module, schedule, new, made_for=first, layers=layers), note


def _kind_of(module: nn.Module) -> type[StatefulLayer] | None:
    """Return the class that lpq itself gives a module that no plugin converts; None: it stays as it is."""
    if type(module) is nn.Linear:
        return Linear
    if holds_transposed(module):
        return TransposedLayer
    if holds_experts(module, replaced=True):
        return TransposedExperts if is_transposed(module) else FusedExperts
    return None


def _why_left(module: nn.Module) -> str | None:
    """Why a module of a class that lpq converts stays as it is: another library changed it. None: none did."""
    if "forward" in vars(module):
        return "its forward was replaced on the object"
    owner: Any = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    maker = getattr(owner.forward, "__globals__", {}).get("__name__", "")
    known = ("torch.", "transformers.")  # the author of another class may have decorated its forward
    if owner.__module__.startswith(known) and not maker.startswith(known):
        return "its forward was replaced on the class"
    kinds = [type(p) for p in module.parameters(recurse=False) if hasattr(p, "__tensor_flatten__")]
    others = [kind for kind in kinds if not kind.__module__.startswith(("torch.", "lpq."))]
    return f"another library encoded its weight: {others[0].__module__}.{others[0].__name__}" if others else None
