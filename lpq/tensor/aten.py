"""PyTorch's operators on a QuantizedTensor, written once over the declared layout.

Three kinds. *Views and moves* act on the buffers (the table below). *Writes* (any operator whose schema mutates an
argument) assign or are refused, see ``lpq.tensor.assigning``. *Everything else* decodes, and warns of it once: the
result is an ordinary tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from lpq.formats.format import Direction, Storage
from lpq.formats.sections import along, cat, matrices, narrowed
from lpq.operations.inputs import DTYPES, as_matrix
from lpq.registry.warning import warn
from lpq.tensor.assigning import AVERAGE, assign, copy_
from lpq.tensor.inference import normal_tensors
from lpq.tensor.input_checks import (
    GIVE_RANKS,
    GRADIENTS,
    check_flattened,
    check_gradient,
    check_received,
    check_shard,
)
from lpq.tensor.quantized_tensor import PrecisionWarning, QuantizedTensor, Window
from lpq.torch_private.dispatch import return_and_correct_aliasing, schema_of
from lpq.torch_private.operators import canonicalize_dim, pin_memory, to_copy, unsafe_view
from lpq.torch_private.pytree import tree_leaves, tree_map

aten = torch.ops.aten
Handler = Callable[..., Any]
_HANDLERS: dict[Any, Handler] = {}


def implements(*functions: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for function in functions:
            _HANDLERS[function] = handler
        return handler

    return register


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that got a QuantizedTensor. A handler returns NotImplemented where buffers cannot express the
    result."""
    if func in GRADIENTS:
        check_gradient(func, args)
    handler = _HANDLERS.get(func)
    result = handler(*args, **kwargs) if handler is not None else NotImplemented
    if result is not NotImplemented:
        if func.is_view:
            return return_and_correct_aliasing(func, args, kwargs, result)  # type: ignore[no-untyped-call]
        return result
    if torch.Tag.inplace_view in func.tags:
        raise TypeError(f"{func} would change the shape of a QuantizedTensor in place: take a view of it")
    if schema_of(func).is_mutable:
        return assign(func, args, kwargs)
    if (result := func.decompose(*args, **kwargs)) is not NotImplemented:  # as torch does outside of inference mode
        return result
    with normal_tensors(func.is_view and not args[0].is_inference()):  # torch takes no other one as a view
        return _decode_and_run(func, args, kwargs)


# ---------------------------------------------------------------------------------------------- views


def _natural(t: QuantizedTensor) -> bool:
    """Whether the last dimension is the matrix's columns, so that the leading ones are its rows."""
    return t.dim() >= 1 and t.shape[-1] == t.matrix_shape[-1]


def _is_whole(t: QuantizedTensor) -> bool:
    """Whether a stack has its own three dimensions, and is no view of others."""
    return tuple(t.shape) == t.matrix_shape


def _narrow(t: QuantizedTensor, dim: int, start: int, stop: int, shape: Sequence[int]) -> Any:
    """Rows (0) or columns (1) ``[start, stop)`` of the matrix, or matrices (0) of a stack, as a tensor of ``shape``."""
    whole_row, whole_col = t.stored
    row = narrowed(whole_row, dim, start, stop) if whole_row is not None else None
    col = narrowed(whole_col, 1 - dim, start, stop) if whole_col is not None else None
    if (row is None) != (whole_row is None) or (col is None) != (whole_col is None):
        return NotImplemented
    part = _same_matrix(t, t.with_operands(row, col, torch.Size(shape), t.dtype))
    if t.is_stack or (start, stop) != (0, t.matrix_shape[dim]):
        window = _window(t)
        part.window = window.narrow(dim, start, stop, window.apart and not _shares(t, dim))
        part.encoded_by = None
    return part


def _window(t: QuantizedTensor) -> Window:
    rows, cols = t.matrix_shape[:2]
    return t.window or Window(t, (0, rows), (0, cols), flipped=False, apart=True)


def _shares(t: QuantizedTensor, dim: int) -> bool:
    """Whether an element of some buffer covers this whole dimension of the matrix, and so all its parts."""
    dims = {"row": dim, "col": 1 - dim}
    return not t.is_stack and any(b.unit(dims[d]) is None for d, s in t.operands for b in s.quantizer.layout)


def _same_matrix(t: QuantizedTensor, view: QuantizedTensor) -> QuantizedTensor:
    """``view``, over the same matrix as ``t``, written to as ``t`` is."""
    view.window, view.writes, view.encoded_by = t.window, t.writes, t.encoded_by
    return view


@implements(aten.detach.default, aten.alias.default)
def _alias(t: QuantizedTensor) -> Any:
    return _same_matrix(t, t.map(aten.alias.default))


@implements(aten.view.default, unsafe_view.default, aten.reshape.default)
def _view(t: QuantizedTensor, size: Sequence[int]) -> Any:
    size = list(size)
    if -1 in size:
        rest = math.prod(s for s in size if s != -1)
        size[size.index(-1)] = t.numel() // rest if rest else 0
    if math.prod(size) != t.numel():
        return NotImplemented  # the operator itself reports the error
    return _same_matrix(t, t.with_operands(*t.stored, torch.Size(size), t.dtype))


@implements(aten.unsqueeze.default)
def _unsqueeze(t: QuantizedTensor, dim: int) -> Any:
    at = canonicalize_dim(t.dim() + 1, dim)
    return _same_matrix(t, t.with_operands(*t.stored, torch.Size([*t.shape[:at], 1, *t.shape[at:]]), t.dtype))


@implements(aten.slice.Tensor)
def _slice(t: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    if step != 1 or t.dim() == 0:
        return NotImplemented
    dim = canonicalize_dim(t.dim(), dim)
    begin, stop, _ = slice(start, end).indices(t.shape[dim])
    stop = max(begin, stop)
    shape = [*t.shape[:dim], stop - begin, *t.shape[dim + 1 :]]
    if t.is_stack:  # which is cut between its matrices, also when it is flattened
        size = 1 if _is_whole(t) else math.prod(t.matrix_shape[1:]) if t.dim() == 1 else 0
        if dim or not size or begin % size or stop % size:
            return NotImplemented
        return _narrow(t, 0, begin // size, stop // size, shape)
    cols = t.matrix_shape[1]
    if t.window is not None and t.window.whole.is_stack:
        return NotImplemented  # a part of one of its matrices, which no window describes
    if _natural(t) and dim == t.dim() - 1:
        return _narrow(t, 1, begin, stop, shape)
    if _natural(t) and all(s == 1 for s in t.shape[:dim]):  # the outermost dimension that has a size
        inner = math.prod(t.shape[dim + 1 : -1])
        return _narrow(t, 0, begin * inner, stop * inner, shape)
    if t.dim() == 1 and cols and begin % cols == 0 and stop % cols == 0:  # a flattened matrix, whole rows
        return _narrow(t, 0, begin // cols, stop // cols, shape)
    return NotImplemented


@implements(aten.select.int)
def _select(t: QuantizedTensor, dim: int, index: int) -> Any:
    """One matrix of a stack."""
    if not t.is_stack or not _is_whole(t) or canonicalize_dim(t.dim(), dim) != 0:
        return NotImplemented
    index = canonicalize_dim(t.shape[0], index)
    one = _narrow(t, 0, index, index + 1, (1, *t.shape[1:]))
    row, col = (matrices(s)[0] if s is not None else None for s in one.stored)
    view = _same_matrix(one, one.with_operands(row, col, t.shape[1:], t.dtype))
    view.amax_group = None  # what other ranks hold are other matrices
    return view


@implements(aten.split.Tensor)
def _split(t: QuantizedTensor, size: int, dim: int = 0) -> Any:
    length = t.shape[canonicalize_dim(t.dim(), dim)]
    sizes = [min(size, length - at) for at in range(0, length, size)] if size else []
    return _split_with_sizes(t, sizes or [min(size, 0)], dim)  # torch refuses these, but for nothing in none


@implements(aten.split_with_sizes.default)
def _split_with_sizes(t: QuantizedTensor, sizes: Sequence[int], dim: int = 0) -> Any:
    if sum(sizes) != t.shape[canonicalize_dim(t.dim(), dim)] or any(size < 0 for size in sizes):
        return NotImplemented
    pieces = [_slice(t, dim, end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return NotImplemented if any(piece is NotImplemented for piece in pieces) else pieces


@implements(aten.as_strided.default)
def _as_strided(t: QuantizedTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    contiguous, step = True, 1
    for length, jump in zip(reversed(size), reversed(stride), strict=True):
        contiguous, step = contiguous and (length == 1 or jump == step), step * length
    if not contiguous or not t.is_contiguous():
        return NotImplemented
    begin, count = offset or 0, math.prod(size)
    flat = _view(t, [-1])
    piece = flat if (begin, count) == (0, t.numel()) else _slice(flat, 0, begin, begin + count)
    if piece is NotImplemented or piece.numel() != count:
        return NotImplemented
    return _view(piece, size)


@implements(aten.t.default)
def _t(t: QuantizedTensor) -> Any:
    flipped = t.quantizer.flipped()
    in_stack = (t.window.whole if t.window is not None else t).is_stack
    if t.dim() != 2 or not _natural(t) or flipped is None or in_stack:
        return NotImplemented
    shape = torch.Size((t.shape[1], t.shape[0]))
    row, col = t.stored
    view = QuantizedTensor(col, row, flipped, shape, t.dtype)
    window = _window(t)
    apart = window.apart and t.amax_group is None  # the view has no group for the other shards
    view.window, view.writes = replace(window, flipped=not window.flipped, apart=apart), t.writes
    view.title = t.title
    return view


@implements(aten.transpose.int)
def _transpose(t: QuantizedTensor, first: int, second: int) -> Any:
    first, second = (canonicalize_dim(t.dim(), dim) for dim in (first, second))
    if t.dim() == 2 and first != second:
        return _t(t)
    return _alias(t) if first == second else NotImplemented


@implements(aten.permute.default)
def _permute(t: QuantizedTensor, dims: Sequence[int]) -> Any:
    order = [canonicalize_dim(t.dim(), dim) for dim in dims]
    if order == list(range(t.dim())):
        return _alias(t)
    return _t(t) if order == [1, 0] else NotImplemented


_HANDLERS[aten.copy_.default] = copy_


# ---------------------------------------------------------------------------------------------- moves and copies


@implements(aten.clone.default)
def _clone(t: QuantizedTensor, *, memory_format: Any = None) -> Any:
    return t.map(torch.clone)


@implements(to_copy.default)
def _to_copy(
    t: QuantizedTensor, *, dtype: torch.dtype | None = None, device: Any = None, layout: Any = None,
    pin_memory: bool | None = None, non_blocking: bool = False, memory_format: Any = None,
) -> Any:  # fmt: skip
    dtype = dtype or t.dtype
    if dtype not in DTYPES:
        return NotImplemented
    moved = t.map(lambda b: b.to(device=device or b.device, non_blocking=non_blocking, copy=True))
    if dtype == t.dtype:
        return moved
    row, col = (s.astype(dtype) if s is not None else None for s in moved.stored)
    return t.with_operands(row, col, t.shape, dtype)


@implements(pin_memory.default)
def _pin_memory(t: QuantizedTensor, device: Any = None) -> Any:
    return t.map(lambda b: b.pin_memory())


@implements(aten.is_pinned.default)
def _is_pinned(t: QuantizedTensor, device: Any = None) -> Any:
    return all(b.is_pinned() for b in t.buffers)


@implements(aten.record_stream.default)
def _record_stream(t: QuantizedTensor, stream: Any) -> None:
    for buffer in t.buffers:
        buffer.record_stream(stream)


@implements(torch.ops.lpq.draw_seeds.default)
def _draw_seeds(x: Tensor, owner: Tensor, count: int) -> Any:
    """Draw with a buffer in place of each tensor, which only gives the device and keeps draws apart."""
    where, whose = (t.buffers[0] if isinstance(t, QuantizedTensor) else t for t in (x, owner))
    return torch.ops.lpq.draw_seeds(where, whose, count)


@implements(aten.empty_like.default)
def _empty_like(t: QuantizedTensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Any:
    return _new_empty(t, t.shape, dtype=dtype, device=device)


@implements(aten.new_empty.default)
def _new_empty(
    t: QuantizedTensor, size: Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Any:
    device = torch.device(device) if device is not None else t.device
    if t.dim() > 1 and tuple(size) == (0,):  # FSDP2 makes it, on every rank, where rows are too few for all ranks
        raise ValueError(
            f"{t.whose}shards of {t.shape[0]} rows of a tensor that is stored as {t.quantizer} leave nothing to some "
            f"ranks: {GIVE_RANKS}"
        )
    size = tuple(size)
    if dtype not in (None, t.dtype) or (t.is_stack and (len(size) != 3 or size[1:] != t.matrix_shape[1:])):
        return torch.empty(size, dtype=dtype or t.dtype, device=device)
    matrix = size if t.is_stack else as_matrix(torch.empty(size, device="meta")).shape
    operands: dict[Direction, Storage] = {
        d: s.quantizer.storage.empty(s.quantizer, along(d, matrix), t.dtype, device) for d, s in t.operands
    }
    return t.with_operands(operands.get("row"), operands.get("col"), torch.Size(size), t.dtype)


@implements(aten.new_zeros.default)
def _new_zeros(
    t: QuantizedTensor, size: Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Any:
    """A tensor to hold another piece of this tensor; FSDP2 creates its shards in this way."""
    is_shard = t.dim() and not t.is_stack and tuple(size[1:]) == tuple(t.shape[1:]) and 0 < size[0] < t.shape[0]
    if is_shard:
        check_shard(t, size[0])
    zeros = _new_empty(t, size, dtype=dtype, device=device).zero_()
    if is_shard and isinstance(zeros, QuantizedTensor):
        zeros.amax_group = "unattached"
    return zeros


def _values_like(function: Any) -> Handler:
    """``zeros_like`` and similar operators make an ordinary tensor of values, such as an optimizer's state."""

    def make(t: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
        return function(torch.empty(t.shape, dtype=t.dtype, device=t.device), *args, **kwargs)

    return make


for _like in (aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like):
    _HANDLERS[_like.default] = _values_like(_like.default)


@implements(aten.cat.default)
def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensor):
            check_flattened(tensor)
    first = tensors[0]
    if not all(_joins(first, t) for t in tensors):
        return NotImplemented
    dim = canonicalize_dim(first.dim(), dim)
    axis = 1 if dim == first.dim() - 1 else 0
    others = {t.shape[:dim] + t.shape[dim + 1 :] for t in tensors}
    if (dim != 0 and (axis == 0 or first.is_stack)) or len(others) > 1:
        return NotImplemented
    rows, cols = [t.stored[0] for t in tensors], [t.stored[1] for t in tensors]
    row = cat(rows, axis) if rows[0] is not None else None
    col = cat(cols, 1 - axis) if cols[0] is not None else None
    if (row is None) != (rows[0] is None) or (col is None) != (cols[0] is None):
        return NotImplemented
    shape = [*first.shape]
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return first.with_operands(row, col, torch.Size(shape), first.dtype)


def _joins(first: Any, other: Any) -> bool:
    return (
        isinstance(first, QuantizedTensor)
        and isinstance(other, QuantizedTensor)
        and all(_is_whole(t) if t.is_stack else _natural(t) for t in (first, other))
        and (first.dim(), first.dtype, first.is_stack) == (other.dim(), other.dtype, other.is_stack)
        and [(d, s.quantizer) for d, s in first.operands] == [(d, s.quantizer) for d, s in other.operands]
    )


# ---------------------------------------------------------------------------------------------- everything else


AVERAGING = (aten.sub.Tensor, aten.mul.Tensor, aten.lerp.Scalar, aten.lerp.Tensor)
"""The first operators of an average, as ``AveragedModel`` and functions for it compute one."""


def _decode_and_run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on decoded tensors."""
    for tensor in tree_leaves(args[:1]):
        if isinstance(tensor, QuantizedTensor):
            check_received(func, tensor)
    tensors: list[QuantizedTensor] = []

    def decode(value: Any) -> Any:
        if not isinstance(value, QuantizedTensor):
            return value
        tensors.append(value)
        return value.dequantize()

    args, kwargs = tree_map(decode, args), tree_map(decode, kwargs)
    copy = ", and writing to the result does not change the tensor" if func.is_view else ""
    warn(  # Python shows the same text from the same place once
        f"{func} has no form on the buffers of {tensors[0].quantizer if tensors else 'a quantized tensor'}: "
        f"it runs on the decoded tensor, in high precision{copy}. Where that is meant, call it on "
        "dequantize(), through which no gradient flows"
        f"{AVERAGE if tensors and tensors[0].title and func in AVERAGING else ''}",
        PrecisionWarning,
    )
    return cast("Any", func(*args, **kwargs))
