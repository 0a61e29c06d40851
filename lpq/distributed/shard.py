"""WeightShard: a high-precision weight that FSDP2 gathers in its quantized form.

It wraps an ordinary tensor, has its layer decide what FSDP2 gathers, and counts writes. FSDP2 cuts, pads and moves
parameters, so views and copies keep the class, and every other operator gives an ordinary tensor. A state dict has an
ordinary tensor over the same data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lpq.operations.operators import written
from lpq.tensor import QuantizedTensor
from lpq.tensor.fsdp_protocol import Gathered
from lpq.tensor.inference import normal_tensors
from lpq.tensor.quantized_tensor import REMEDY, Writes
from lpq.tensor.rebuilt import set_attributes
from lpq.torch_private.dtensor import dtensor_as
from lpq.torch_private.operators import pin_memory, to_copy
from lpq.torch_private.pytree import tree_map_only
from lpq.torch_private.tensors import (
    is_parameter,
    local_part,
    local_parts,
    no_torch_function,
    version_of,
    wrapper_subclass,
)

aten = torch.ops.aten
COPIES = {
    pin_memory.default, to_copy.default, aten.clone.default, aten.empty_like.default,
    aten.new_empty.default, aten.new_zeros.default,
}  # fmt: skip
"""The operators, beside views, that cut, pad, move and create a parameter."""


class WeightShard(Gathered, Tensor):
    """A weight, or a shard of one, in high precision."""

    held: Tensor
    """The ordinary tensor that holds the data."""
    writes: Writes
    """The count of the writes to it by operators, which its views share."""

    @property
    def write_count(self) -> int:
        """A number that changes when it is written to, also by compiled code, which writes to ``held`` itself."""
        return self.writes.count + (0 if self.held.is_inference() else version_of(self.held))

    @property
    def buffers(self) -> list[Tensor]:
        return [self.held]

    @property
    def data(self) -> Tensor:
        """A view that is detached from autograd. Assigning a tensor to it takes over the memory of that."""
        view: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return view

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            place = getattr(self.layer() if self.layer is not None else None, "qualified_name", "")
            raise ValueError(
                f"{f'{place}.weight: ' if place else ''}this weight, which lpq.convert(…, weights=…) prepared, is "
                f"{list(self.shape)}, and what is assigned to its data {list(value.shape)}, as "
                f"FullyShardedDataParallel (FSDP1) does it: {REMEDY}"
            )
        new = plain(value.detach())
        self.writes.count = self.write_count + 1
        Tensor.data.__set__(self, WeightShard(new, self.writes))  # type: ignore[attr-defined]
        self.held = new

    @staticmethod
    def __new__(cls, data: Tensor, writes: Writes | None = None, whole: Tensor | None = None) -> WeightShard:
        with normal_tensors(not (data if whole is None else whole).is_inference()):  # a view is as the weight it is of
            self: WeightShard = wrapper_subclass(
                cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
            )
        self.held, self.writes = data, Writes() if writes is None else writes
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        shards: dict[int, WeightShard] = {}
        args = [_unwrapped(value, shards) for value in args]
        kwargs = {name: _unwrapped(value, shards) for name, value in (kwargs or {}).items()}
        result = func(*args, **kwargs)
        if func.is_view:  # a write to it is a write to the weight
            (whole,) = shards.values()
            return tree_map_only(Tensor, lambda view: WeightShard(view, whole.writes, whole), result)
        if func in COPIES:
            return as_shard(result)
        if changed := [shards[id(value)] for value in written(func, args, kwargs) if id(value) in shards]:
            for shard in changed:
                shard.writes.count += 1
            torch.autograd.graph.increment_version(changed)  # torch counts no write to a tensor in a list
        return tree_map_only(Tensor, lambda t: shards.get(id(t), t), result)

    __torch_function__ = no_torch_function

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> WeightShard:
        return WeightShard(inner["held"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_parameter(self):  # of a pickled module; a state dict has no parameters
            return prepared_parameter, (self.held, self.requires_grad, self.given())
        return self.held.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = WeightShard(self.held.clone())
        memo[id(self)] = prepared_parameter(copy, self.requires_grad) if is_parameter(self) else copy
        return cast("Tensor", memo[id(self)])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WeightShard({self.held!r})"


def _unwrapped(value: Any, shards: dict[int, WeightShard]) -> Any:
    """An argument with the data of each shard in place of the shard, which ``shards`` gets by the data's ``id``."""
    if type(value) is list and value and type(value[0]) is list:  # as scatter has them
        return [_unwrapped(each, shards) for each in value]
    if type(value) is list:  # an optimizer's step has long ones, for which torch's trees are slow
        shards.update({id(each.held): each for each in value if isinstance(each, WeightShard)})
        return [each.held if isinstance(each, WeightShard) else each for each in value]
    if not isinstance(value, WeightShard):
        return value
    shards[id(value.held)] = value
    return value.held


def prepared_parameter(tensor: Tensor, requires_grad: bool, attributes: Any = None) -> Tensor:
    """Make a parameter of this data that FSDP2 may gather quantized, with attributes that others have set on it."""
    if type(tensor) is not Tensor and not isinstance(tensor, WeightShard):  # a file may hold anything
        raise TypeError(f"a weight was saved as a {type(tensor).__name__}, which is no tensor: do not trust the file")
    return cast(Tensor, set_attributes(nn.Parameter(as_shard(tensor), requires_grad=requires_grad), attributes))


def as_shard(tensor: Tensor) -> Tensor:
    """Return the same data as a WeightShard; a tensor of any class but ``Tensor`` is returned itself."""
    return WeightShard(tensor) if type(tensor) is Tensor else tensor


def in_place_of(weight: Tensor, new: Tensor) -> Tensor:
    """The new weight of a layer, prepared for gathers in the same way as ``weight``, whole or sharded."""
    stored, new_part = local_part(weight), as_shard(local_part(new).detach())
    if isinstance(stored, QuantizedTensor):
        if not isinstance(new_part, QuantizedTensor):
            remedy = "load without assign=True, or with lpq.optim.load_high_precision"
            if weight.is_meta:
                remedy = "call model.to_empty(device=…) first, since PyTorch assigns to tensors on the meta device"
            raise ValueError(
                f"{stored.whose}a {list(weight.shape)} weight is stored as {stored.quantizer}, and an ordinary tensor "
                f"cannot take its place: {remedy}, and it is encoded"
            )
        new_part.title, new_part.owner = stored.title, stored.owner
    if isinstance(weight, DTensor) and not isinstance(new, DTensor):
        remedy = "load by set_model_state_dict of torch.distributed.checkpoint.state_dict"
        raise ValueError(f"a {list(weight.shape)} weight is sharded, and an ordinary tensor is not: {remedy}")
    return dtensor_as(new, new_part) if isinstance(new, DTensor) else new_part


def ordinary(weight: Tensor) -> Tensor:
    """Return the same data in an ordinary tensor, whole or sharded, whose version counts writes; a weight that is
    stored quantized is returned itself."""
    part = local_part(weight)
    if not isinstance(part, WeightShard):
        return weight.detach()
    data = part.held.detach()  # of the tensor that counts: of a view that an operator made torch counts apart
    return dtensor_as(weight, data) if isinstance(weight, DTensor) else data


def plain(tensor: Tensor) -> Tensor:
    """Return the same data as an ordinary tensor."""
    return plain_each((tensor,))[0]


def plain_each(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The data of each as an ordinary tensor."""
    return [t.held if isinstance(t, WeightShard) else t for t in tensors]


def touched(tensor: Tensor) -> None:
    """Count a write that went into a tensor's memory directly: everything derived from them is out of date."""
    touched_each((tensor,))


def touched_each(tensors: Iterable[Tensor]) -> None:
    """``touched`` of each."""
    tensors = [*tensors]
    parts = local_parts(tensors)
    for local in parts:
        if isinstance(local, WeightShard):
            local.writes.count += 1
    torch.autograd.graph.increment_version(tensors + parts)
