"""The first steps of layers whose quantizers measure as long as their state is empty (``Quantizer.fresh``).

Whether the state of a tensor is empty is decided on the host, as a pass is bound to the answer: a layer has the names
of these tensors in ``passes.fresh``. They stay there through all passes before the first step of an optimizer, whether
these are of one batch, of several that accumulate, or of an evaluation, and whether code is compiled or not. After the
step, when ranks have combined their states, values decide: a state that nothing has moved stays fresh. Values decide,
too, when states are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from lpq.distributed.optimizer_steps import Watcher
from lpq.kernels.host_to_device import recording
from lpq.nn.passes import Passes
from lpq.operations.operators import ORDINARY
from lpq.operations.reduce_statistics import Reductions
from lpq.torch_private.tensors import local_part


class HasStates(Protocol):
    """A layer, as far as it is read here."""

    passes: Passes

    @property
    def stores_weight(self) -> bool:
        """Whether its weight is stored quantized."""

    def states(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The state of each tensor that has one."""


class FreshStates(Watcher):
    """The layers of a model that have fresh states, until steps of optimizers have moved these."""

    def __init__(self) -> None:
        self._layers: dict[int, ref[HasStates]] = {}
        """The layers by their ``id``; the references of some may be dead."""
        super().__init__()

    def add(self, layer: HasStates) -> None:
        """Have the states of this layer looked at after steps."""
        self._layers[id(layer)] = ref(layer)

    def concerns(self, params: Mapping[int, Tensor]) -> bool:
        """Whether an optimizer is of interest: each is, as the weight of a frozen layer is in none."""
        return True

    def after_step(self, optimizer: Optimizer, reductions: Reductions) -> None:
        """Decide anew once ranks have combined their states."""
        if self._layers:
            reductions.afterwards(self._decide)

    def _decide(self) -> None:
        if recording():
            return
        layers = [layer for reference in [*self._layers.values()] if (layer := reference()) is not None]
        for layer, fresh in zip(layers, still_fresh(layers), strict=True):
            layer.passes.fresh = fresh
        self._layers = {id(layer): ref(layer) for layer in layers if layer.passes.fresh}


@torch.no_grad()
def still_fresh(layers: Sequence[HasStates]) -> list[tuple[str, ...]]:
    """The tensors of each layer whose states nothing has moved, by the values of these."""
    found = [[*plan.fresh] if (plan := layer.passes.plan) is not None else [] for layer in layers]
    by_device: dict[torch.device, list[tuple[list[str], str, Tensor]]] = {}
    for layer, fresh in zip(layers, found, strict=True):
        for tensor, state in layer.states().items() if fresh else ():
            values = [local_part(memory).flatten() for memory in state.values()]
            if tensor not in fresh:
                continue
            if tensor == "w" and layer.stores_weight:  # it is encoded where it is written, and not by its state
                fresh.remove(tensor)
            elif type(values[0]) in ORDINARY and not values[0].is_meta:
                by_device.setdefault(values[0].device, []).append((fresh, tensor, torch.cat(values).any()))
    for states in by_device.values():
        for (fresh, tensor, _), has_moved in zip(states, torch.stack([m for *_, m in states]).tolist(), strict=True):
            if has_moved:
                fresh.remove(tensor)
    return [*map(tuple, found)]
