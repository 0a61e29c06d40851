"""The common part of trainers' callbacks: the policy in a checkpoint, and going on from one under the same policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lpq.checkpoint.description import Description
from lpq.checkpoint.errors import CheckpointError
from lpq.checkpoint.model import Model
from lpq.nn import replan
from lpq.nn.called import read_past, uncalled
from lpq.nn.plan import memories
from lpq.registry.showing import listed
from lpq.registry.warning import warn

CALLBACK = "LpqCallback"
"""The name of the callback of each trainer."""


def policy_of(model: nn.Module) -> dict[str, Any]:
    """The policy of a converted model as plain data, for a checkpoint."""
    data: Mapping[str, Any] = Model(model).describe({}, None).data()
    return {key: data[key] for key in ("conversions", "formats")}


def go_on(
    model: nn.Module, step: int, steps: int | None, policy: Mapping[str, Any] | None, *, any_policy: bool, remedy: str
) -> None:
    """Plan the model's policy for a run, and make sure that it can go on from the checkpoint.

    Args:
        model: The converted model.
        step: The step that begins.
        steps: The length of the run; None: the trainer does not know it.
        policy: The policy of the checkpoint, of ``policy_of``; None: there is none to compare.
        any_policy: Go on under another policy.
        remedy: The call that helps where layers would lose their states, as the end of a sentence.
    """
    if steps is not None:
        _plan(model, steps)
    if policy is not None and not any_policy:
        saved = Description.read({**Description().data(), **policy})
        try:
            Model(model).check_policy(saved, "as it stands above", f"{CALLBACK}(any_policy=True)")
        except CheckpointError as error:
            raise CheckpointError(f"the Trainer cannot go on from this checkpoint: {error}") from None
    if step and (lost := would_forget(model, step)):
        raise CheckpointError(
            f"the states of these layers were not loaded, since they had other recipes then: {listed(lost)}. {remedy}"
        )


def _plan(model: nn.Module, steps: int) -> None:
    lengths = [
        c.steps for c in Model(model).conversions().values() if any(type(r.until) is float for r in c.policy.rules)
    ]
    if other := [length for length in lengths if length not in (None, "later", steps)]:
        warn(
            f"the policy was planned for {other[0]} steps, and the Trainer takes {steps}: rules that end at a fraction "
            "of the run go by the Trainer's number. lpq.convert(…, steps='later') leaves it to the Trainer",
        )
    replan(model, steps=steps)


def warn_of_uncalled(model: nn.Module) -> None:
    """Warn of converted layers that the passes so far have not called, and whose weight they have read."""
    if idle := sorted(uncalled(model) & read_past(model)):
        warn(
            f"the model reads the weights of these converted layers and does not call them, so it multiplies in high "
            f"precision: {listed(idle)}. lpq.report(model) counts them as not converted"
        )


def would_forget(model: nn.Module, step: int) -> list[str]:
    """The layers that will have another recipe at this step than they have now, and would remember something."""
    layers = ((name, layer, layer.schedule.at(step)) for name, layer in Model(model).layers() if layer.schedule)
    return [name for name, layer, recipe in layers if recipe and recipe != layer.recipe and memories(recipe)]


def begins_afresh(model: nn.Module, step: int) -> list[str]:
    """The layers that had remembered something before this step, if nothing of any of them was loaded."""
    layers = {
        name: layer
        for name, layer in Model(model).layers()
        if layer.memories() and (layer.schedule is None or layer.schedule.at(step - 1) == layer.recipe)
    }
    return [] if any(memory.any() for layer in layers.values() for memory in layer.memories().values()) else [*layers]
