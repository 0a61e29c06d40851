"""The parts of a tensor in a checkpoint: plain tensors only, each with its own placement.

A quantized tensor is its buffers. Where a weight is sharded by rows, row buffers are sharded along their rows, column
buffers along their columns, and a buffer whose elements span the sharded dimension is the same on every rank. Row
buffers of several matrices have them along a dimension of their own, as ranks may hold unequal numbers. The parts share
their memory with the model, so that loading into them is loading in place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lpq import registry
from lpq.checkpoint.errors import CheckpointError, tensor_name
from lpq.distributed.shard import plain
from lpq.distributed.shard_groups import attach
from lpq.distributed.shardability import why_not_placed, why_uncut
from lpq.formats import Buffer, Quantizer
from lpq.formats.format import Direction
from lpq.formats.sections import along
from lpq.tensor import QuantizedTensor
from lpq.tensor.encode_writes import write
from lpq.torch_private.dtensor import dtensor_over
from lpq.torch_private.tensors import local_part


def here(name: str, tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; an error if the tensor has no memory."""
    local = local_part(tensor)
    if local.is_meta:
        raise CheckpointError(
            f"{tensor_name(name)} is on the meta device, where there is nothing to save and no place to load into: "
            "call model.to_empty(device=…) first"
        )
    return local


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks hold parts of a tensor."""
    return isinstance(tensor, DTensor) and not all(isinstance(p, Replicate) for p in tensor.placements)


def parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors that represent a tensor in a checkpoint, by name; each is plain or a DTensor over a plain one."""
    local = here(name, tensor)
    if not isinstance(local, QuantizedTensor):
        ordinary = plain(local.detach())  # for DCP all ranks hold the same in it, of which it saves one
        return {name: _placed_like(tensor, ordinary) if is_sharded(tensor) else ordinary}
    tensors = {}
    count = tensor.shape[:1] if local.is_stack else ()
    matrix = (math.prod(tensor.shape[len(count) : -1]), tensor.shape[-1])
    for direction, storage in local.operands:
        for buffer, value in zip(storage.quantizer.layout, storage.tensors(), strict=True):
            part, shape = f"{name}.{direction}.{buffer.name}", (*count, *buffer.grid(*along(direction, matrix)))
            own, first = value.detach(), bool(count)
            high = buffer.unit(0) if direction == "row" and tensor.dim() > 2 and not first else None
            if high is not None and math.prod(tensor.shape[1:-1]) % high == 0 and tensor.shape[0]:
                first, shape = True, (tensor.shape[0], shape[0] // tensor.shape[0], *shape[1:])
                own = own.view(local.shape[0], shape[1], *own.shape[1:])
            of = (name, tensor, direction, buffer, first, local.is_stack)
            placements = tuple(_placement(p, *of) for p in tensor.placements) if isinstance(tensor, DTensor) else ()
            tensors[part] = _placed(part, own, tensor, shape, placements)
    return tensors


def described(tensor: Tensor) -> dict[str, Any] | None:
    """The plain data by which a quantized tensor is rebuilt from its parts; None for any other tensor."""
    local = local_part(tensor)
    if not isinstance(local, QuantizedTensor):
        return None
    return {
        "quantizer": local.quantizer.text,
        "shape": list(tensor.shape),
        "dtype": str(local.dtype).removeprefix("torch."),
        "operands": {direction: storage.quantizer.text for direction, storage in local.operands},
        **({"stack": True} if local.is_stack else {}),
    }


def plain_like(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised ordinary tensor with the shape and the placement of this tensor; ``name`` is for errors."""
    local = here(name, tensor)
    return _placed_like(tensor, torch.empty(local.shape, dtype=dtype, device=local.device))


def stored_like(name: str, tensor: Tensor, entry: Mapping[str, Any]) -> Tensor:
    """An uninitialised quantized tensor as ``described`` describes it, with the one operand that decoding needs.

    It is sharded as this ordinary tensor is; where shards would cut blocks, every rank has the whole.
    """
    local, quantizer = here(name, tensor), registry.quantizer(entry["quantizer"])
    stack = bool(entry.get("stack"))
    direction, text = next(iter(entry["operands"].items()))
    side, alone = registry.quantizer(text), [*entry["operands"]] == ["row"] and not stack
    fits = not isinstance(tensor, DTensor) or (
        why_not_placed(side, tensor) is None if alone else _fits(tensor, quantizer, stack)
    )
    shape = local.shape if fits else tensor.shape
    count = shape[:1] if stack else ()
    matrix, dtype = (*count, math.prod(shape[len(count) : -1]), shape[-1]), getattr(torch, entry["dtype"])
    operand = side.storage.empty(side, along(direction, matrix), dtype, local.device)
    row, col = (operand, None) if direction == "row" else (None, operand)
    quantized = QuantizedTensor(row, col, quantizer, shape, dtype)
    return _placed_like(tensor, quantized) if fits else quantized


def decoded(tensor: Tensor) -> Tensor:
    """An ordinary tensor with the values and the placement of this tensor."""
    local = local_part(tensor)
    return _placed_like(tensor, local.dequantize() if isinstance(local, QuantizedTensor) else plain(local.detach()))


@torch.no_grad()
def copy(target: Tensor, source: Tensor) -> None:
    """Copy into an ordinary tensor the values of one that is placed like it, or that every rank has whole."""
    values = local_part(source)
    if isinstance(values, QuantizedTensor):
        values = values.dequantize(target.dtype)
    local_part(target).copy_(values if isinstance(source, DTensor) else values[chunk(target)])


def encode(pairs: Collection[tuple[Tensor, Tensor]]) -> None:
    """Write values, of which each rank has its part, into quantized tensors, with the statistics of the whole."""
    for tensor, _ in pairs:
        attach(tensor)
    targets = [cast("QuantizedTensor", local_part(tensor)) for tensor, _ in pairs]
    write(targets, [local_part(v).reshape(t.matrix_shape) for t, (_, v) in zip(targets, pairs, strict=True)])


def chunk(tensor: Tensor) -> tuple[slice, ...]:
    """The place, in the whole, of this rank's share of a part."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(None) for _ in tensor.shape)
    (place,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(slice(o, o + s) for o, s in zip(place.offsets, place.sizes, strict=True))


def whole(part: Tensor) -> Tensor:
    """Gather the whole of a part on every rank, as bytes, since backends do not support all dtypes."""
    if not isinstance(part, DTensor):
        return part.detach()
    local = local_part(part)
    single = local.dtype.itemsize == 1
    travels = DTensor.from_local(  # which moves an offloaded tensor to a device where it can travel
        local.view(torch.uint8) if single else local, part.device_mesh, part.placements,
        run_check=False, shape=part.shape, stride=part.stride(),
    )  # fmt: skip
    gathered = travels.full_tensor()
    return gathered.view(local.dtype) if single else gathered


def _placed_like(tensor: Tensor, local: Tensor) -> Tensor:
    """A tensor of which this rank holds ``local``, with the shape and the placement of this tensor."""
    if not isinstance(tensor, DTensor):
        return local
    return dtensor_over(local, tensor.device_mesh, tensor.placements, tensor.shape)


def _fits(tensor: DTensor, quantizer: Quantizer, stack: bool) -> bool:
    """Whether a tensor's shards are of whole rows, and hold whole blocks of the format."""
    cuts = [(p, n) for p, n in zip(tensor.placements, tensor.device_mesh.shape, strict=True) if not p.is_replicate()]
    by_rows = all(type(p) is Shard and p.dim == 0 for p, _ in cuts)
    return by_rows and why_uncut(quantizer, tensor.shape[0], math.prod(n for _, n in cuts), stack) is None


def _placement(
    placement: Placement, name: str, tensor: Tensor, direction: Direction, buffer: Buffer, first: bool, stack: bool
) -> Placement:
    """The placement of a buffer, by the placement of its quantized tensor along the same dimension of a mesh."""
    if isinstance(placement, Replicate):
        return placement
    by_rows = tensor.dim() > 1 and getattr(placement, "dim", None) == 0
    if by_rows and (first or (direction == "row" and not stack)):
        return placement if first or buffer.unit(0) is not None else Replicate()
    if stack or type(placement) is not Shard or placement.dim not in (0, tensor.dim() - 1):
        raise CheckpointError(
            f"{tensor_name(name)} is quantized and placed by {placement}: shard it along its first or its last "
            "dimension"
        )
    dim = int(direction == "row" or by_rows)
    return Replicate() if buffer.unit(dim) is None else Shard(dim + first)


def _placed(
    name: str, local: Tensor, like: Tensor, shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> Tensor:
    """A buffer of which this rank holds ``local``; an ordinary tensor where all ranks hold the same."""
    if not isinstance(like, DTensor) or all(isinstance(p, Replicate) for p in placements):
        return local
    part = dtensor_over(local, like.device_mesh, placements, shape)
    expected = tuple(s.stop - s.start for s in chunk(part))
    if expected != tuple(local.shape):
        raise CheckpointError(
            f"{tensor_name(name)}: a shard of {list(local.shape)} is held where equal shards of {list(shape)} would be "
            f"{list(expected)}: the shards cut blocks of the format, or do not belong to a DTensor"
        )
    return part
