"""Sections: matrices that are each encoded and multiplied independently.

A *stack* has matrices of one size, one behind the other along a leading dimension. A format and its layout are written
for one matrix. The buffers of a stack are the buffers of its matrices, stacked; a buffer with one value for a whole
matrix has one value for each. So a stack can be cut anywhere between two matrices.

*Groups* are rows of several matrices of different sizes, one behind the other. Where each group ends is in a tensor on
the device only, so buffers have a size that suffices for any sizes of the groups. In an operand each group begins at a
multiple of ``unit``, so that no block is of two groups. A buffer with a value for all rows of a matrix has one for each
group. Places that belong to no group are zero. The groups lie along dimension 0 of a row operand and along dimension 1,
the contraction, of a column operand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.formats.format import Direction, Quantizer, Storage
from lpq.formats.layout import Buffer, as_bytes

ALIGNED = 128
"""Groups along a contraction begin at a multiple of this, so that lines of 8-bit elements are aligned for the fetches
of GPUs: else a product takes longer."""


class Sections(NamedTuple):
    """How a tensor is divided: into groups of rows, whose ends are in a tensor, or into the matrices of a stack."""

    number: int
    stack: bool
    at_once: bool
    """Whether the device computes all groups at once, so that the host does not read where they end."""


# ---------------------------------------------------------------------------------------------- stacks


def is_stack(shape: Sequence[object]) -> bool:
    """Whether an operand of this shape is a stack ``[count, rows, cols]``."""
    return len(shape) == 3


def matrices(stack: Storage) -> list[Storage]:
    """The operands of the matrices, over views of the buffers."""
    parts = zip(*(tensor.unbind() for tensor in stack.tensors()), strict=True)
    return [stack.from_tensors(list(tensors), stack.quantizer, stack.shape[1:], stack.dtype) for tensors in parts]


def part(stack: Storage, start: int, stop: int) -> Storage:
    """The stack of matrices ``[start, stop)``, as views."""
    tensors = [tensor[start:stop] for tensor in stack.tensors()]
    return stack.from_tensors(tensors, stack.quantizer, (stop - start, *stack.shape[1:]), stack.dtype)


def narrowed(operand: Storage, dim: int, start: int, stop: int) -> Storage | None:
    """Rows (0) or columns (1) of a matrix, as ``Storage.narrow``; of a stack, matrices."""
    return part(operand, start, stop) if is_stack(operand.shape) else operand.narrow(dim, start, stop)


def joined(stack: Storage) -> Storage | None:
    """Return the operand of one matrix, all matrices of the stack below each other, over views of the buffers. Values
    of a whole matrix become values of its rows. Return None where that would join blocks of two matrices, or rows have
    no such values."""
    (count, rows, cols), side = stack.shape, stack.quantizer
    heights = [buffer.block[0] for buffer in side.layout]
    if not count or any(height and rows % height for height in heights) or side.why_no_parts(0) is not None:
        return None
    tensors = [t if height is None else t.flatten(0, 1) for height, t in zip(heights, stack.tensors(), strict=True)]
    if None not in heights:
        return stack.from_tensors(tensors, side, (count * rows, cols), stack.dtype)
    if side.by_rows is None:
        return None
    owners = torch.arange(count, device=tensors[0].device).repeat_interleave(rows, output_size=count * rows)
    return with_values_of_rows(side, tensors, owners, (count * rows, cols), stack.dtype)


def with_values_of_rows(
    side: Quantizer, tensors: Sequence[Tensor], owners: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Storage | None:
    """Return the operand of the rows of several matrices, each with the values of its matrix; ``owners`` has the number
    of each row's matrix. Return None where the format has no such operand (``Quantizer.by_rows``)."""
    if side.by_rows is None or any(buffer.block[0] is None and buffer.block[1] is not None for buffer in side.layout):
        return None
    own = [t if b.block[0] is not None else t[owners].unsqueeze(1) for b, t in zip(side.layout, tensors, strict=True)]
    return side.storage.from_tensors(own, side.by_rows, shape, dtype)


def stacked(operands: Sequence[Storage]) -> Storage:
    """Stack these operands, at least one, which have one size and one quantizer."""
    first = operands[0]
    tensors = [torch.stack(buffers) for buffers in zip(*(o.tensors() for o in operands), strict=True)]
    return first.from_tensors(tensors, first.quantizer, (len(operands), *first.shape), first.dtype)


def along(direction: Direction, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of an operand in this direction, from the shape of a matrix or a stack; the function is its own
    inverse."""
    *count, rows, cols = shape
    return (*count, rows, cols) if direction == "row" else (*count, cols, rows)


# ---------------------------------------------------------------------------------------------- joining


def cat(parts: Sequence[Storage], dim: int, agreed: bool = False) -> Storage | None:
    """The operand of matrices laid side by side along rows (0) or columns (1); None where they do not join.

    They join on whole blocks, and where one value covers the whole dimension all parts must agree on it. Matrices of a
    format that must not be cut along this dimension never join. ``agreed``: such values come from the same statistics.
    So they are not compared, and the host does not wait for a GPU. Stacks join matrix behind matrix.
    """
    first = parts[0]
    if is_stack(first.shape):
        every = [torch.cat(buffers) for buffers in zip(*(p.tensors() for p in parts), strict=True)]
        shape = sum(p.shape[0] for p in parts), *first.shape[1:]
        return first.from_tensors(every, first.quantizer, shape, first.dtype)
    if len(parts) > 1 and first.quantizer.why_no_parts(dim) is not None:
        return None
    sizes = [p.shape[dim] for p in parts]
    buffers: list[Tensor] = []
    for i, buffer in enumerate(first.quantizer.layout):
        block, tensors = buffer.unit(dim), [p.tensors()[i] for p in parts]
        if block is not None and any(size % block for size in sizes[:-1]):
            return None
        if block is None and not agreed and not all(_same(tensors[0], t) for t in tensors[1:]):
            return None
        # A buffer that all parts share is copied, too: a result of torch.cat must not change with its parts.
        buffers.append(tensors[0].clone() if block is None else torch.cat(tensors, dim))
    rows, cols = first.shape
    shape = (sum(sizes), cols) if dim == 0 else (rows, sum(sizes))
    return first.from_tensors(buffers, first.quantizer, shape, first.dtype)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two buffers hold the same bytes; views of one buffer do, without a comparison."""
    one_view = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return a.shape == b.shape and (one_view or torch.equal(as_bytes(a), as_bytes(b)))


# ---------------------------------------------------------------------------------------------- groups


def unit(side: Quantizer, dim: int) -> int:
    """Each group is padded in an operand to a multiple of this number of rows (0) or columns (1)."""
    if side.plain:
        return 1
    return math.lcm(ALIGNED if dim == 1 else 1, *side.units(dim))


def why_not_row_by_row(quantizer: Quantizer) -> str | None:
    """Why rows cannot be encoded before their groups are known, and kept as a row operand alone; None if they can. Each
    row then has the same bytes in any group, and the column operand of a group is made of these bytes."""
    side = quantizer.side("row")
    if side.plain:
        return f"{side} leaves rows as they are"
    if side.stochastic:
        return f"{side} rounds with random bits of a row's place in its group"
    for covering in (*side.stats, *side.layout):
        if covering.block[0] is None:
            return f"{covering.name} of {side} is of all rows of a group together"
        if covering.block[0] > 1:
            return f"{covering.name} of {side} is of {covering.block[0]} rows together"
    if side.why_no_parts(0) is not None:
        return side.why_no_parts(0)
    for each in (side, quantizer.side("col")):
        if each.state:
            return f"{each} is scaled by what is known of the experts of each rank"
    if quantizer.col_source != "row":
        return (
            f"the column operand of {quantizer}, of which the gradient of the weight is made, is not made of its row "
            "operand, as col_source=row has it"
        )
    return None


def capacity(rows: int, groups: int, unit: int) -> int:
    """The number of rows that suffices for ``rows`` rows in ``groups`` groups, each padded to a multiple of
    ``unit``."""
    return (rows + groups * (unit - 1)) // unit * unit


def grid(buffer: Buffer, rows: int, cols: int, groups: int, dim: int, unit: int) -> tuple[int, ...]:
    """The shape of a buffer of an operand ``[rows, cols]`` with ``groups`` groups along ``dim``."""
    values = () if buffer.values is None else (buffer.values,)
    if buffer.block == (None, None):
        return (groups, *values)
    if dim == 0:
        rows = capacity(rows, groups, unit)
    else:
        cols = capacity(cols, groups, unit)
    lattice = [*buffer.lattice(rows, cols)]
    if buffer.block[dim] is None:
        lattice[dim] = groups
    return (*lattice, *values)


def piece(buffer: Buffer, tensor: Tensor, group: int, at: int, rows: int, cols: int, dim: int) -> Tensor:
    """The part of a buffer that belongs to one group, a matrix ``[rows, cols]`` that begins at ``at``: a view."""
    if buffer.block == (None, None):
        return tensor[group]
    step = buffer.block[dim]
    if step is None:
        return tensor.narrow(dim, group, 1)
    return tensor.narrow(dim, at // step, buffer.lattice(rows, cols)[dim])


def bounds(offs: Sequence[int]) -> list[tuple[int, int]]:
    """Where each group begins and ends."""
    return list(zip((0, *offs), offs, strict=False))


def starts(offs: Sequence[int], unit: int) -> list[int]:
    """Where each group begins in an operand in which they are padded to multiples of ``unit``."""
    sizes = [-(-(stop - start) // unit) * unit for start, stop in bounds(offs)]
    return list(accumulate(sizes, initial=0))[:-1]
