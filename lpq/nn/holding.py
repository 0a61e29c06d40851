"""Holding weights: each is encoded once for all micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from lpq.distributed.optimizer_steps import Watcher
from lpq.nn.first_argument import Model, check_model
from lpq.nn.linear import Layer
from lpq.operations.reduce_statistics import Reductions


class _Held(Watcher):
    """Layers that hold their weights. It counts the writes of fused optimizers, which autograd does not."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = [*layers]
        super().__init__()

    def concerns(self, params: Mapping[int, Tensor]) -> bool:
        return any(id(layer.weight) in params for layer in self.layers)

    def after_step(self, optimizer: Optimizer, reductions: Reductions) -> None:
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        torch.autograd.graph.increment_version([m.weight for m in self.layers if id(m.weight) in theirs])


@contextmanager
def hold_weights(model: Model) -> Iterator[Model]:
    """Encode every weight once, for all micro-batches inside the ``with``; take the optimizer's step outside.

    Weights that were changed meanwhile are refused, by the next pass or, as compiled layers do not check, on leaving.

    Args:
        model: The model whose layers hold their weights.
    """
    check_model(model)
    layers = [m for m in model.modules() if isinstance(m, Layer)]
    if not layers:
        raise ValueError("hold_weights: the model has no layer of lpq: call lpq.convert(model, …) first")
    own = [layer for layer in layers if layer.passes.held_weight is None]

    noticing = _Held(own)
    try:
        for layer in own:
            layer.hold_weight()
        yield model
        for layer in own:
            layer.held_weight()
    finally:
        noticing.layers.clear()
        for layer in own:
            layer.release_weight()
