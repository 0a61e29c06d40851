"""Converted layers that no pass has called, while it called others; and those whose weight a pass has read past them.

A module may read the weight of a layer and multiply by it itself, as the attention of some models does, and fused code.
Its products are in high precision then, whatever recipe the layer has.
"""

from __future__ import annotations

from torch import nn

from lpq.nn.names import plain_name
from lpq.nn.stateful_layer import StatefulLayer

UNCALLED = "; no pass has called it so far, while others were called: code that reads its weight multiplies as before"
"""The end of a note in the report."""
READ = "; a pass has read its weight, too: what code beside the layer multiplies by it is in high precision"
"""The end of another note."""


def uncalled(model: nn.Module) -> set[str]:
    """The names of these layers. There are none before the first pass, nor where a compiler traced a pass: compiled
    code notes nothing."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, StatefulLayer) and m.recipe is not None}
    passes = [layer.passes for layer in layers.values()]
    if any(each.traced for each in passes) or not any(each.called for each in passes):
        return set()
    return {plain_name(name) for name, layer in layers.items() if not (layer.passes.called or _waits(layer))}


def read_past(model: nn.Module) -> set[str]:
    """The names of layers with a recipe whose weight the pass of another module has read."""
    layers = ((name, m) for name, m in model.named_modules() if isinstance(m, StatefulLayer) and m.recipe is not None)
    return {plain_name(name) for name, layer in layers if layer.passes.read_past}


def _waits(layer: StatefulLayer) -> bool:
    """Whether its schedule leaves the layer in high precision at some step, in which it notes no pass."""
    return layer.schedule is not None and any(recipe is None for _, recipe in layer.schedule.pieces)
