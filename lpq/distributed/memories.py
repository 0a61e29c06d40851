"""The memories of delayed scaling on ranks that share a model: the largest values of all ranks count.

Each rank remembers amaxes of its own inputs. After a step of an optimizer the memories are made equal: whichever rank
saves them, all ranks can go on from the saved values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lpq.distributed.alike import converted
from lpq.distributed.replicas import Replicas
from lpq.operations.reduce_statistics import Reductions
from lpq.torch_private import fsdp
from lpq.torch_private.tensors import local_part


class _Layer(NamedTuple):
    """A layer that may remember something, for as long as it lives."""

    layer: weakref.ref[nn.Module]
    weight: Tensor
    """This is no weak reference: ``module.to()`` could not exchange a parameter that has one."""
    mesh: int
    """The ``id`` of the mesh over which the weight lies; 0: over none."""


class Memories:
    """The layers of a model that may remember something, and the ranks that share them, at the time of construction."""

    def __init__(self, root: nn.Module, mine: Callable[[Any], bool], replicas: Replicas | None = None) -> None:
        """``mine``: whether it is to serve a layer of ``root``."""
        sharded = fsdp.sites(fsdp.outermost(root), "weight")
        self._layers: list[_Layer] = []
        self._replicas = replicas or Replicas()
        for module in converted(root):
            if hasattr(module, "gather") and mine(module):
                weight = sharded[module].param if module in sharded else next(module.parameters(recurse=False), None)
                if weight is not None:
                    mesh = id(weight.device_mesh) if isinstance(weight, DTensor) else 0
                    self._layers.append(_Layer(weakref.ref(module), weight, mesh))

    def reduce(self, optimizer: Optimizer, reductions: Reductions) -> bool:
        """Add the memories of the layers whose weight this optimizer has to ``reductions``; those, too, whose weight is
        frozen: no optimizer has it. Return whether there are any that ranks share."""
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        over: dict[int, list[ProcessGroup]] = {}
        shared = False
        for ref, weight, mesh in self._layers:
            layer: Any = ref()
            if layer is None or (weight.requires_grad and id(weight) not in params):
                continue
            plan = layer.passes.plan
            if plan is None or not plan.moving:
                continue
            states = [getattr(layer, memory.name) for memory in layer.state_buffers() if memory.moves]
            if isinstance(states[0], DTensor):
                states = [*map(local_part, states)]
            if mesh not in over and isinstance(weight, DTensor):
                over[mesh] = weight.device_mesh.get_all_groups()
            for group in over[mesh] if mesh else self._replicas.of([weight]):
                reductions.add(states, group, [(layer,)] * len(states))
                shared = shared or group.size() > 1
        return shared
