"""The steps of a converted model's run: its recipes at a step, and another length of the run."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lpq.nn.conversion import RECORD, Conversion, check_length, conversions
from lpq.nn.conversion_plan import check_layers, names_of
from lpq.nn.first_argument import check_model
from lpq.nn.names import plain_name
from lpq.nn.sharded_weights import check_weights
from lpq.nn.stages import last_change
from lpq.nn.stateful_layer import StatefulLayer, give_recipes


def set_step(model: nn.Module, step: int) -> None:
    """Give every layer the recipe that the policy has for this step. Weights and optimizer state stay.

    Where recipes change by step and an optimizer steps without this, the next forward warns.

    Args:
        model: The converted model.
        step: The number of the step that begins, from 0 on. A step beyond the length of the run is refused.
    """
    check_model(model)
    if type(step) is not int or step < 0:
        raise ValueError(f"set_step: a step is a whole number from 0 on, not {step!r}")
    lengths = [c.steps for c in conversions(model).values() if isinstance(c.steps, int)]
    if lengths and step > min(lengths):
        raise ValueError(
            f"set_step: step {step} is beyond the run, for which lpq.convert has steps={min(lengths)}: convert "
            "with the length of the run, or give it to lpq.replan"
        )
    layers = [module for module in model.modules() if isinstance(module, StatefulLayer) and module.schedule is not None]
    give_recipes({layer: layer.schedule.at(step) for layer in layers if layer.schedule is not None})
    for layer in layers:
        if layer.model.stages is not None:
            layer.model.stages.move(step)


def replan(model: nn.Module, *, steps: int) -> None:
    """Plan the policy for a run of another length than ``convert`` was given.

    Layers keep the recipe that they have until ``set_step``. Recipes that ``convert`` would refuse are refused here,
    before anything is changed.

    Args:
        model: The converted model.
        steps: The length of the run.
    """
    conversions(model)
    check_length(steps)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, StatefulLayer) and m.schedule is not None}
    planned = {name: layer.schedule.replan(steps) for name, layer in layers.items() if layer.schedule is not None}
    check_layers(layers, planned)
    check_weights(model, layers, None, None, planned)
    for name, layer in layers.items():
        layer.schedule = planned[name]
        if layer.model.stages is not None:
            layer.model.stages.last = last_change(planned.values())

    for module in model.modules():
        if not isinstance(conversion := module.__dict__.get(RECORD), Conversion):
            continue
        every = [plain_name(alias) for aliases in names_of(module).values() for alias in aliases]
        report = replace(conversion.report, unreached=conversion.policy.unreached(every, steps))
        module.__dict__[RECORD] = replace(conversion, steps=steps, report=report)
