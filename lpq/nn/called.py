"""Converted layers that no pass has called, while it called others; and layers whose weight a pass read past them.

A layer takes its weight from its parameters, so that what reads the attribute is other code, and the layer's own pass
has nothing to do for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lpq.nn.stateful_layer import StatefulLayer, stateful_layers
from lpq.torch_private.callers import another_pass_reads

UNCALLED = "; no pass has called it so far, while others were called: code that reads its weight multiplies as before"
READ = "; a pass has read its weight, too: what code beside the layer multiplies by it is in high precision"
"""The ends of notes in the report."""


class Weight:
    """The weight as an attribute of a class of layers. It notes the first such read in the layer's ``passes``; a read
    that a compiler traces is not noted."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: Any = None) -> Any:
        if layer is None:
            return self
        parameters = layer._parameters
        if self.name not in parameters:
            raise AttributeError(self.name)  # so that torch looks elsewhere, and says so
        passes = vars(layer).get("passes")  # none while the class before the conversion sets it up
        if not (torch.compiler.is_compiling() or passes is None or passes.read_past) and another_pass_reads(layer):
            passes.read_past = True
        return parameters[self.name]


def uncalled(model: nn.Module) -> set[str]:
    """The names of these layers; none before the first pass, nor where a compiler traced one, whose code notes none."""
    layers = {name: layer for name, layer in stateful_layers(model).items() if layer.recipe is not None}
    passes = [layer.passes for layer in layers.values()]
    if any(each.traced for each in passes) or not any(each.called for each in passes):
        return set()
    return {name for name, layer in layers.items() if not (layer.passes.called or _waits(layer))}


def read_past(model: nn.Module) -> set[str]:
    """The names of layers with a recipe whose weight the pass of another module has read."""
    layers = stateful_layers(model).items()
    return {name for name, layer in layers if layer.recipe is not None and layer.passes.read_past}


def _waits(layer: StatefulLayer) -> bool:
    """Whether its schedule leaves the layer in high precision at some step, in which it notes no pass."""
    return layer.schedule is not None and any(recipe is None for _, recipe in layer.schedule.pieces)
