"""The layers in which ``lpq.search`` chooses recipes, by shape: linear layers, and experts, which share a recipe."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import nn

from lpq.bench.layers import LayerSize, StackSize, linear_layers
from lpq.nn.expert_stacks import expert_stacks
from lpq.nn.names import plain_name
from lpq.nn.stateful_layer import StatefulLayer
from lpq.tensor.observed import Observed


class StackShape(NamedTuple):
    """The matrices of one layer, or of one stack of experts."""

    layer: nn.Module
    stack: str
    inputs: int
    outputs: int
    experts: int | None
    """None: it is a linear layer."""

    def size(self, tokens: int, rows: int, whole: int) -> LayerSize:
        """The size for these tokens, where a pass had ``rows`` of ``whole`` tokens; 0: nobody knows how many."""
        if self.experts is None:
            return LayerSize(tokens, self.inputs, self.outputs)
        share = rows / whole if rows and whole else 1.0
        return StackSize(max(1, round(tokens * share)), self.inputs, self.outputs, self.experts)


def searched_layers(model: nn.Module) -> dict[str, list[StackShape]]:
    """Return the shapes of all layers that were converted, by the name of their module."""
    linear = linear_layers(model).items()
    shapes = {plain_name(name): [StackShape(model.get_submodule(name), "", *of, None)] for name, of in linear}
    for one in expert_stacks(model):
        if isinstance(one.holder, StatefulLayer):
            experts, rows, cols = one.weight.shape
            inputs, outputs = (rows, cols) if one.is_transposed else (cols, rows)
            shape = StackShape(one.holder, one.key, inputs, outputs, experts)
            shapes.setdefault(one.holder_name, []).append(shape)
    return shapes


class Rows:
    """An observer that counts the rows of each layer and stack."""

    def __init__(self) -> None:
        self._rows: Counter[tuple[int, str]] = Counter()

    def observe(self, tensor: Observed) -> None:
        if tensor.name == "x" and not tensor.again:
            self._rows[id(tensor.layer), tensor.stack] += tensor.given.numel() // tensor.given.shape[-1]

    def of(self, one: StackShape) -> int:
        """Return the rows that a layer or a stack had."""
        return self._rows[id(one.layer), one.stack]
