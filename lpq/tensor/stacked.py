"""PyTorch's operators on a QuantizedTensor that is a stack: its leading dimension counts matrices.

It is cut, joined and taken apart between its matrices only. All other operators are those of ``lpq.tensor.aten``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lpq.formats.format import Storage
from lpq.formats.stacks import matrices, part
from lpq.tensor.quantized_tensor import QuantizedTensor, Window
from lpq.torch_private.operators import canonicalize_dim


def slice_stack(t: QuantizedTensor, dim: int, start: int, stop: int, shape: Sequence[int]) -> Any:
    """Matrices ``[start, stop)`` as a view; of a flattened stack, elements ``[start, stop)``."""
    if dim != 0:
        return NotImplemented
    if tuple(t.shape) != t.matrix_shape:
        size = math.prod(t.matrix_shape[1:])
        if t.dim() != 1 or not size or start % size or stop % size:
            return NotImplemented
        start, stop = start // size, stop // size
    row, col = (part(s, start, stop) if s is not None else None for s in t.stored)
    return _view(t, row, col, shape, start, stop)


def select(t: QuantizedTensor, dim: int, index: int) -> Any:
    """One matrix, as a view."""
    if not t.is_stack or tuple(t.shape) != t.matrix_shape or canonicalize_dim(t.dim(), dim) != 0:
        return NotImplemented
    index = canonicalize_dim(t.shape[0], index)
    row, col = (matrices(part(s, index, index + 1))[0] if s is not None else None for s in t.stored)
    view = _view(t, row, col, t.shape[1:], index, index + 1)
    view.amax_group = None  # what other ranks hold are other matrices
    return view


def _view(
    t: QuantizedTensor, row: Storage | None, col: Storage | None, shape: Sequence[int], start: int, stop: int
) -> QuantizedTensor:
    view = t.with_operands(row, col, torch.Size(shape), t.dtype)
    count, rows, _ = t.matrix_shape
    window = t.window or Window(t, (0, count), (0, rows), flipped=False, apart=True)
    view.window, view.writes = window.narrow(0, start, stop, apart=True), t.writes
    return view


def cat_stacks(tensors: Sequence[QuantizedTensor], dim: int) -> Any:
    """One stack of the matrices of several stacks, which have one size."""
    first, sizes = tensors[0], [t.matrix_shape for t in tensors]
    if dim != 0 or any(
        tuple(t.shape) != size or size[1:] != sizes[0][1:] for t, size in zip(tensors, sizes, strict=True)
    ):
        return NotImplemented
    total = sum(size[0] for size in sizes)
    joined = [_joined([t.stored[i] for t in tensors], total) for i in (0, 1)]
    return first.with_operands(joined[0], joined[1], torch.Size((total, *sizes[0][1:])), first.dtype)


def _joined(operands: Sequence[Storage | None], total: int) -> Storage | None:
    first, given = operands[0], [operand for operand in operands if operand is not None]
    if first is None:
        return None
    tensors: list[Tensor] = [torch.cat(buffers) for buffers in zip(*(o.tensors() for o in given), strict=True)]
    return first.wrap(tensors, first.quantizer, (total, *first.shape[1:]), first.dtype)
