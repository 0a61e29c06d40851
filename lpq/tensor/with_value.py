"""An encoded tensor that knows the tensor which was encoded, for all that takes no operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from lpq.formats.format import Quantizer, Storage
from lpq.tensor.quantized_tensor import QuantizedTensor
from lpq.torch_private.dispatch import schema_of
from lpq.torch_private.pytree import tree_leaves, tree_map

aten = torch.ops.aten
FORMER = "would multiply its former values: write to a copy, or call lpq.unfuse on the block"
SAME = aten.detach.default, aten.alias.default
Value = Tensor | Callable[[], Tensor]
"""A tensor, or a function that computes it."""


class WithValue(QuantizedTensor):
    """The output of a producer, whose consumers are layers, which multiply its operands. Other code may take it beside
    them: a router, an adapter, a residual, a mask of one call in a hundred. Every operator takes the tensor as it was
    before it was encoded, and nothing is decoded. ``detach`` keeps the operands, and a view of the same shape, as a
    ``DTensor`` takes one of its part."""

    source: Value
    beside: Sequence[QuantizedTensor] = ()
    """The same tensor in other encodings, for layers that take it so."""

    def encoded_as(self, quantizer: Quantizer) -> QuantizedTensor:
        """The tensor as this quantizer has encoded it; as it is, if none is."""
        return next((other for other in self.beside if other.quantizer == quantizer), self)

    @property
    def value(self) -> Tensor:
        """The tensor as it was before it was encoded. A function that computes it is called once."""
        if not isinstance(self.source, Tensor):
            self.source = self.source()
        return self.source

    def written(self) -> TypeError:
        """The error where autograd has counted a write: to a view, as others are refused at once."""
        what = f"the output of a norm that encodes it, {[*self.shape]},"
        return TypeError(f"{what} was written to by way of a view, and layers {FORMER}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled, and copied by ``copy``, as the tensor that autograd knows, which no encoding has rounded."""
        return self.expand(self.shape).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.expand(self.shape), memo)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names, context = super().__tensor_flatten__()
        return [*names, "value"], context

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Any, ...], outer_size: torch.Size, outer_stride: tuple[int, ...]
    ) -> WithValue:
        encoded = QuantizedTensor.__tensor_unflatten__(inner, context, outer_size, outer_stride)
        row, col = encoded.stored
        return _with_source(inner["value"], row, col, encoded)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in SAME or (func is aten.view.default and [*args[1]] == [*args[0].shape]):
            t = args[0]
            row, col = t.stored
            same = _with_source(t.source, row, col, t)
            same.operand_cache, same.encoded_by, same.writes = t.operand_cache, t.encoded_by, t.writes
            same.beside = t.beside
            return same
        if schema_of(func).is_mutable:
            into = kwargs["out"] if kwargs and "out" in kwargs else args[0]
            if any(isinstance(t, WithValue) for t in tree_leaves(into)):
                raise TypeError(f"{func} would write to the output of a norm that encodes it, and layers {FORMER}")
        args, kwargs = tree_map(_value, args), tree_map(_value, kwargs or {})
        return func(*args, **kwargs)


def _with_source(source: Value, row: Storage | None, col: Storage | None, like: QuantizedTensor) -> WithValue:
    tensor = WithValue(row, col, like.quantizer, like.shape, like.dtype)
    assert isinstance(tensor, WithValue)
    tensor.source = source
    return tensor


def _value(t: Any) -> Any:
    return t.value if isinstance(t, WithValue) else t
