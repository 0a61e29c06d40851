"""DTensors over the very tensor that is given.

``DTensor.from_local`` makes a view, and copies an offloaded tensor to the mesh's device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def dtensor_over(local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> DTensor:
    """Make a contiguous DTensor of this shape of which this rank holds this very tensor."""
    strides = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), strides, local.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def dtensor_as(like: DTensor, local: Tensor) -> DTensor:
    """Make one that is sharded as ``like`` is, of which this rank holds this very tensor."""
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]
