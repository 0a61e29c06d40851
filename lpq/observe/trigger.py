"""Replays of the steps that leave the course of a run: which layers did it, and rules that promote them for a while."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import nn

from lpq.nn.conversion import conversions
from lpq.nn.stateful_layer import StatefulLayer, stateful_layers
from lpq.observe.course import Course
from lpq.observe.culprits import Culprits, culprits, in_bf16, refuse_static
from lpq.observe.replay import Before, Closure, kept_gradients
from lpq.observe.sharing import inside_of_replicas
from lpq.observe.sums import ITSELF
from lpq.registry.showing import listed
from lpq.registry.warning import warn

ONCE = "Steps that stay off the course are not replayed again"
CLOSE = 0.1
"""The part by which a step and its replay may differ: a step that ran compiled rounds otherwise."""
OTHERS = (
    "the replay is of something else, as where the training adds terms to the loss that the model returns, or where "
    "the machine erred in the step"
)


class Trigger:
    """Looks at each step of a run, and into the one that leaves its course."""

    def __init__(self, course: Course | None = None, promote: int = 0, **options: Any) -> None:
        """``promote``: for how many steps the culprits are in bf16 then; 0: they stay. ``options`` go to
        ``lpq.observe.culprits``."""
        self.course, self.promote, self.options = course or Course(), promote, options
        self.found: dict[int, Culprits] = {}
        """The culprits of steps that were replayed. Words and this count a step when it is done, as records and logs
        do: the first is step 1."""
        self.promoted: list[tuple[int, dict[str, str]]] = []
        """The promotions so far: the step before which each holds, and the recipes of layers."""

    def check(self, model: nn.Module) -> None:
        """Refuse, where a run begins, a model of which no layer could be promoted when it is found. Warn of layers that
        could not be."""
        if not self.promote:
            return
        conversions(model)
        layers = {n: layer for n, layer in stateful_layers(inside_of_replicas(model)).items() if _has_recipe(layer)}
        static = [name for name, layer in layers.items() if layer.static_values()]
        if static and len(static) == len(layers):
            refuse_static(layers[static[0]], "behind a promotion")
        if static:
            warn(f"promote={self.promote}: {_stay(static)}. Other layers are promoted")

    def look(
        self, model: nn.Module, step: int, loss: float, norm: float | None, closure: Closure, before: Before | None
    ) -> str | None:
        """Take a step whose backward has run, and replay it where it leaves the course; return what was found in words.
        Gradients, which may have been clipped, are as before afterwards. ``step``: the number for ``lpq.set_step``."""
        why = self.course.leaves(loss, norm)
        if why is None:
            return None
        own = self.course if self.course.why(loss, norm) is not None else None  # None: a condition of a subclass
        with kept_gradients(model.parameters()):  # of clipped gradients no replay has the like
            result = self.found[step + 1] = culprits(model, closure, before=before, course=own, **self.options)
        words = f"step {step + 1}: {why}\n{result}\n{ONCE}"
        pairs = [("loss", loss, result.loss), *([] if norm is None else [("gradient norm", norm, result.norm)])]
        for name, ours, theirs in pairs:
            if math.isfinite(ours) != math.isfinite(theirs) or abs(ours - theirs) > CLOSE * abs(ours):
                words += f"\nThe {name} of the replay is {theirs:.4g}, and of the step {ours:.4g}: {OTHERS}"
        if self.promote and result.found:
            words += self._promote(model, step, result)
        return words

    def _promote(self, model: nn.Module, step: int, result: Culprits) -> str:
        """Promote the culprits that may be in bf16 for a while; return which they are in words."""
        layers, stay = stateful_layers(inside_of_replicas(model)), list[str]()
        for one in result.found:
            if any(layers[name].static_values() for name in replace(result, found=(one,)).promoted(model)):
                stay.append(one.layer)
        rest = replace(result, found=tuple(one for one in result.found if one.layer not in stay))
        words = ""
        if rest.found:
            until, recipes = step + 1 + self.promote, rest.promoted(model)
            rest.promote(model, until=until)
            self.promoted.append((until, {name: recipe.text for name, recipe in recipes.items()}))
            who = listed([one.layer or ITSELF for one in rest.found]) if stay else "They"
            words = f"\n{who} are in bf16 in steps {step + 2} to {until}"
            if beside := [*recipes.keys() - {one.layer for one in rest.found}]:
                words += f", with layers that share states of inputs with them: {', '.join(sorted(beside))}"
        return f"{words}\n{_stay(stay)}" if stay else words

    def done_again(self, loss: float, norm: float) -> tuple[float, float]:
        """Take a step that was done again by other recipes, in place of the one that left the course: the next that
        leaves it is replayed. Return what was given."""
        self.course.leaves(loss, norm)
        return loss, norm


def _has_recipe(layer: StatefulLayer) -> bool:
    """Whether the layer has something to promote, now or at a later step."""
    own = (layer.recipe,) if layer.schedule is None else tuple(recipe for _, recipe in layer.schedule.pieces)
    return any(recipe is not None and recipe != in_bf16(layer, recipe) for recipe in own)


def _stay(layers: list[str]) -> str:
    names = listed([name or ITSELF for name in layers])
    return (
        f"no promotion reaches {names}: static scales would be gone behind it. Leave such layers in bf16, or calibrate "
        "the model again by lpq.calibrate"
    )
