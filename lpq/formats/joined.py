"""Operands laid side by side, as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lpq.formats.format import Storage
from lpq.formats.layout import as_bytes
from lpq.formats.sections import is_stack


def cat(parts: Sequence[Storage], dim: int, agreed: bool = False) -> Storage | None:
    """The operand of matrices laid side by side along rows (0) or columns (1); None where they do not join.

    They join on whole blocks, and where one value covers the whole dimension all parts must agree on it. Matrices of a
    format that must not be cut along this dimension never join. ``agreed``: such values come from the same statistics.
    So they are not compared, and the host does not wait for a GPU. Stacks join matrix behind matrix.
    """
    first = parts[0]
    if is_stack(first.shape):
        stacked = [torch.cat(buffers) for buffers in zip(*(p.tensors() for p in parts), strict=True)]
        return first.wrap(stacked, first.quantizer, (sum(p.shape[0] for p in parts), *first.shape[1:]), first.dtype)
    if len(parts) > 1 and first.quantizer.why_no_parts(dim) is not None:
        return None
    sizes = [p.shape[dim] for p in parts]
    joined: list[Tensor] = []
    for i, buffer in enumerate(first.quantizer.layout):
        unit, tensors = buffer.unit(dim), [p.tensors()[i] for p in parts]
        if unit is not None and any(size % unit for size in sizes[:-1]):
            return None
        if unit is None and not agreed and not all(_same(tensors[0], t) for t in tensors[1:]):
            return None
        # A buffer that all parts share is copied, too: a result of torch.cat must not change with its parts.
        joined.append(tensors[0].clone() if unit is None else torch.cat(tensors, dim))
    rows, cols = first.shape
    shape = (sum(sizes), cols) if dim == 0 else (rows, sum(sizes))
    return first.wrap(joined, first.quantizer, shape, first.dtype)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two buffers hold the same bytes; views of one buffer do, without a comparison."""
    one_view = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return a.shape == b.shape and (one_view or torch.equal(as_bytes(a), as_bytes(b)))
