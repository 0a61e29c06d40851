"""Replays of the steps that leave the course of a run: which layers did it, and rules that promote them for a while."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from lpq.nn.conversion import conversions
from lpq.nn.stateful_layer import stateful_layers
from lpq.observe.course import Course
from lpq.observe.culprits import Culprits, culprits, refuse_static
from lpq.observe.replay import Before, Closure, kept_gradients

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
        """Refuse, where a run begins, a model whose culprits could not be promoted when they are found."""
        if self.promote:
            conversions(model)
            for layer in stateful_layers(model).values():
                refuse_static(layer, "behind a promotion")

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
            until, recipes = step + 1 + self.promote, result.promoted(model)
            result.promote(model, until=until)
            self.promoted.append((until, {name: recipe.text for name, recipe in recipes.items()}))
            words += f"\nThey are in bf16 in steps {step + 2} to {until}"
            if beside := [*recipes.keys() - {one.layer for one in result.found}]:
                words += f", with layers that share states of inputs with them: {', '.join(sorted(beside))}"
        return words

    def done_again(self, loss: float, norm: float) -> tuple[float, float]:
        """Take a step that was done again by other recipes, in place of the one that left the course: the next that
        leaves it is replayed. Return what was given."""
        self.course.leaves(loss, norm)
        return loss, norm
