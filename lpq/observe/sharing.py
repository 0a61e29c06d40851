"""How ranks share a model, and the device on which this one computes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as Replicas

from lpq.nn.unwrapping import unwrapped
from lpq.observe.readings import NumericsError
from lpq.torch_private.distributed import active_replica


def is_shared(model: nn.Module) -> bool:
    """Whether ranks share the model: its parameters lie over a mesh, or it has replicas."""
    over_a_mesh = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return over_a_mesh or any(isinstance(module, Replicas) for module in model.modules())


def inside_of_replicas(model: nn.Module) -> nn.Module:
    """The model without the wrapper that keeps its replicas equal: in it layers have the names that rules know."""
    inside = unwrapped(model)
    return inside.module if isinstance(inside, Replicas) else model


def refuse_inside(owner: str, shared: bool) -> None:
    """Raise an error in a forward of replicas where ``owner`` got no more than the module inside of their wrapper."""
    wrapper = None if shared else active_replica()
    if wrapper is not None and wrapper.process_group.size() > 1:
        raise NumericsError(
            f"{owner}: the model is inside of a DistributedDataParallel, and each rank would count its own batches "
            "alone: give the DistributedDataParallel in place of the module inside"
        )


def device_of(parameter: Tensor) -> torch.device:
    """The device of passes with this parameter, whose shards may be kept on the host."""
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device
