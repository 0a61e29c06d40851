"""WeightShard: a high-precision weight that FSDP2 gathers in its quantized form.

It has its data as any tensor has; its class adds that FSDP2 asks the layer what to gather, and that writes to it are
counted. FSDP2 cuts, pads and moves parameters, so those operators keep the class and every other one gives an ordinary
tensor. It is pickled and saved as an ordinary tensor, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from lpq.core.gathered import Gathered

aten = torch.ops.aten
VIEWS = {
    aten.alias.default, aten.as_strided.default, aten.detach.default, aten.slice.Tensor, aten.split.Tensor,
    aten.split_with_sizes.default, aten.view.default,
}  # fmt: skip
COPIES = {
    aten._pin_memory.default, aten._to_copy.default, aten.clone.default, aten.empty_like.default,
    aten.new_empty.default, aten.new_zeros.default,
}  # fmt: skip
"""With these and the views a parameter is cut, padded, moved and made."""


class WeightShard(Gathered, Tensor):
    """A weight, or a shard of one, in high precision."""

    writes: list[int]
    """How often it was written to: a list of one number that it shares with its views."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        shards: dict[int, WeightShard] = {}

        def unwrap(shard: WeightShard) -> Tensor:
            tensor = plain(shard)
            shards[id(tensor)] = shard
            return tensor

        args, kwargs = tree_map_only(WeightShard, unwrap, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            for written in _written(func, args, kwargs):
                if id(written) in shards:
                    shards[id(written)].writes[0] += 1
        if func in VIEWS:
            (whole,) = shards.values()
            return tree_map_only(Tensor, lambda view: _shard(view, whole.writes), result)
        if func in COPIES:
            return as_shard(result)
        return tree_map_only(Tensor, lambda t: shards.get(id(t), t), result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).requires_grad_(self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = as_shard(plain(self).clone()).requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copy._is_param = True
        memo[id(self)] = copy
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WeightShard({plain(self)!r})"


def as_shard(tensor: Tensor) -> Tensor:
    """The same data, gathered quantized; a tensor that is of a class of its own stays as it is."""
    return _shard(tensor, [0]) if type(tensor) in (Tensor, torch.nn.Parameter) else tensor


def _shard(tensor: Tensor, writes: list[int]) -> Tensor:
    with no_dispatch():
        shard = Tensor._make_subclass(WeightShard, tensor)
    shard.writes = writes
    return shard


def plain(shard: Tensor) -> Tensor:
    """The same data as an ordinary tensor."""
    with no_dispatch():
        return Tensor._make_subclass(Tensor, shard)


def _written(func: Any, args: Any, kwargs: Any) -> Iterable[Any]:
    """The arguments that an operator writes to."""
    schema = func._schema.arguments
    given = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
    for argument, value in given:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from value if isinstance(value, list | tuple) else [value]
