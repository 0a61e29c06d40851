"""The process group of a sharded parameter, attached to this rank's shard.

The group is found from the mesh, at run time, and never saved.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from lpq.operations.derived_operands import made_at_use, rounds_stochastically
from lpq.tensor import QuantizedTensor
from lpq.torch_private.tensors import local_part


def attach(parameter: Tensor) -> None:
    """Attach the group that shards a parameter to its local part, if that is stored quantized.

    FSDP2's first gather does that, and so do the step of any optimizer, ``lpq.optim``, ``lpq.checkpoint``, and any
    write to the weight of a layer that FSDP2 has sharded. Call it for other shards, such as shards from a file or a
    pickle: before it, a write that needs statistics of the whole tensor is an error.

    Args:
        parameter: The sharded parameter, a DTensor.
    """
    part = local_part(parameter)
    if not isinstance(parameter, DTensor) or not isinstance(part, QuantizedTensor):
        return
    mesh = parameter.device_mesh
    sharded = [i for i, placement in enumerate(parameter.placements) if placement.is_shard()]
    if len(sharded) != 1:
        return
    quantizer = part.quantizer
    replicas = mesh.size() // mesh.size(sharded[0])
    if replicas > 1 and rounds_stochastically(quantizer) and not made_at_use(quantizer):
        raise ValueError(
            f"{part.whose}a {list(parameter.shape)} weight is stored as {quantizer}, which rounds stochastically: its "
            f"{replicas} replicas would be rounded with different random bits and part. Store it with another "
            "quantizer, or shard over one dimension of the mesh"
        )
    part.amax_group = mesh.get_group(sharded[0])
