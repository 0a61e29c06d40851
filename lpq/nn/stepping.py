"""The steps of a converted model's run: its recipes at a step, another length of the run, and rules that come in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from lpq.nn.conversion import RECORD, Conversion, conversions, recorded
from lpq.nn.conversion_plan import check_layers, rule_names
from lpq.nn.first_argument import check_model, check_whole
from lpq.nn.sharded_weights import check_weights
from lpq.nn.stages import Stages, last_change
from lpq.nn.stateful_layer import StatefulLayer, give_recipes
from lpq.recipes import Recipe, Rule, Schedule
from lpq.recipes.globs import exactly


def set_step(model: nn.Module, step: int) -> None:
    """Give every layer the recipe that the policy has for this step. Weights and optimizer state stay.

    Where recipes change by step and an optimizer steps without this, the next forward warns.

    Args:
        model: The converted model.
        step: The number of the step that begins, from 0 on. A step beyond the length of the run is refused.
    """
    check_model(model)
    check_whole("set_step", 0, step=step)
    lengths = [c.steps for c in conversions(model).values() if isinstance(c.steps, int)]
    if lengths and step > min(lengths):
        raise ValueError(
            f"set_step: step {step} is beyond the run, for which lpq.convert has steps={min(lengths)}: convert "
            "with the length of the run, or give it to lpq.replan"
        )
    recipes = {layer: layer.schedule.at(step) for layer in _scheduled(model) if layer.schedule is not None}
    changes: dict[Stages, bool] = {}
    for layer, recipe in recipes.items():
        if layer.model.stages is not None:
            changes[layer.model.stages] = changes.get(layer.model.stages, False) or layer.recipe != recipe
    give_recipes(recipes)
    for stages, change in changes.items():
        stages.move(step, change)


def replan(model: nn.Module, *, steps: int) -> None:
    """Plan the policy for a run of another length than ``convert`` was given.

    Layers keep the recipe that they have until ``set_step``. Recipes that ``convert`` would refuse are refused here,
    before anything is changed.

    Args:
        model: The converted model.
        steps: The length of the run.
    """
    conversions(model)
    check_whole("replan", 1, steps=steps)
    _take(model, {layer: layer.schedule.replan(steps) for layer in _scheduled(model) if layer.schedule is not None})
    for _, module, conversion in recorded(model):
        every = [alias for aliases in rule_names(module, conversion.within).values() for alias in aliases]
        report = replace(conversion.report, unreached=conversion.policy.unreached(every, steps))
        module.__dict__[RECORD] = replace(conversion, steps=steps, report=report)


def promote(model: nn.Module, recipes: Mapping[StatefulLayer, Recipe], *, until: int) -> None:
    """Put rules before the policy's own that give layers these recipes before a step. They hold from the next
    ``set_step`` on, and belong to the policy that checkpoints keep. Rules of earlier promotions that end sooner make
    room. All ranks that share the model call this.

    Args:
        model: The converted model.
        recipes: The recipes of some of its layers.
        until: The first step at which they no longer hold.
    """
    conversions(model)
    planned: dict[StatefulLayer, Schedule] = {}
    records: dict[nn.Module, Conversion] = {}
    for _, module, conversion in recorded(model):
        new = [(layer, layer.schedule) for layer in _scheduled(module) if layer not in planned]
        own = [(layer, schedule.planned[1]) for layer, schedule in new if schedule and schedule.planned]
        names = rule_names(module, conversion.within)
        match = {layer: tuple(map(exactly, names.get(name, [name]))) for layer, name in own if layer in recipes}
        rules = [Rule(patterns, recipes[layer], until) for layer, patterns in match.items()]
        hidden = [r for r in conversion.policy.rules for one in rules if {*r.match} <= {*one.match} and one.outlasts(r)]
        policy = replace(conversion.policy, rules=(*rules, *(r for r in conversion.policy.rules if r not in hidden)))
        planned |= {layer: policy.schedule(name, conversion.steps) for layer, name in own}
        records[module] = replace(conversion, policy=policy)
    if lacking := [layer.title for layer in recipes if layer not in planned]:
        raise ValueError(f"promote: {lacking[0]} has no recipe of a policy: convert the model by lpq.convert")
    _take(model, planned)
    for module, record in records.items():
        module.__dict__[RECORD] = record


def _scheduled(model: nn.Module) -> list[StatefulLayer]:
    return [m for m in model.modules() if isinstance(m, StatefulLayer) and m.schedule is not None]


def _take(model: nn.Module, planned: Mapping[StatefulLayer, Schedule]) -> None:
    """Give layers schedules, or none if one of them cannot have its own. They keep the recipes of the present step."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, StatefulLayer) and m in planned}
    schedules = {name: planned[layer] for name, layer in layers.items()}
    check_layers(layers, schedules)
    check_weights(model, layers, None, None, schedules)
    last, stages = last_change(planned.values()), None
    for layer, schedule in planned.items():
        layer.schedule = schedule
        if layer.model.stages is None and len(schedule.pieces) > 1:
            stages = layer.model.stages = stages or Stages(model, last)
    for stages in filter(None, {layer.model.stages for layer in planned}):
        stages.last = last
