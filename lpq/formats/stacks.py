"""Stacks: operands of several matrices of one size, one behind the other along a leading dimension.

A format is written for one matrix, and its layout is of one. The buffers of a stack are those of its matrices, stacked:
a buffer with a value for a whole matrix has one for each. So nothing of one matrix depends on another, and
a stack can be cut anywhere between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lpq.formats.format import Direction, Storage


def is_stack(shape: Sequence[object]) -> bool:
    """Whether an operand of this shape is a stack ``[count, rows, cols]``."""
    return len(shape) == 3


def matrices(stack: Storage) -> list[Storage]:
    """The operands of the matrices, over views of the buffers."""
    parts = zip(*(tensor.unbind() for tensor in stack.tensors()), strict=True)
    return [stack.wrap(list(tensors), stack.quantizer, stack.shape[1:], stack.dtype) for tensors in parts]


def part(stack: Storage, start: int, stop: int) -> Storage:
    """The stack of matrices ``[start, stop)``, as views."""
    tensors = [tensor[start:stop] for tensor in stack.tensors()]
    return stack.wrap(tensors, stack.quantizer, (stop - start, *stack.shape[1:]), stack.dtype)


def narrowed(operand: Storage, dim: int, start: int, stop: int) -> Storage | None:
    """Rows (0) or columns (1) of a matrix, as ``Storage.narrow``; of a stack, matrices."""
    return part(operand, start, stop) if is_stack(operand.shape) else operand.narrow(dim, start, stop)


def joined(stack: Storage) -> Storage | None:
    """Return the operand of one matrix, that of all matrices below each other, over views of the buffers; None where
    that would join blocks of two of them, or values of whole matrices."""
    (count, rows, cols), side = stack.shape, stack.quantizer
    heights = [buffer.block[0] for buffer in side.layout]
    if not count or any(height is None or rows % height for height in heights) or side.why_no_parts(0) is not None:
        return None
    tensors = [tensor.flatten(0, 1) for tensor in stack.tensors()]
    return stack.wrap(tensors, side, (count * rows, cols), stack.dtype)


def stacked(operands: Sequence[Storage]) -> Storage:
    """The stack of these operands, at least one, of matrices of one size and with one quantizer."""
    first = operands[0]
    tensors = [torch.stack(buffers) for buffers in zip(*(o.tensors() for o in operands), strict=True)]
    return first.wrap(tensors, first.quantizer, (len(operands), *first.shape), first.dtype)


def each(function: Callable[[Storage], Storage], stack: Storage, empty: Callable[[], Storage]) -> Storage:
    """Return the stack of the results of ``function`` for each matrix; ``empty`` makes it where there is no matrix."""
    return stacked([function(matrix) for matrix in matrices(stack)]) if stack.shape[0] else empty()


def along(direction: Direction, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of an operand in this direction, of a matrix or of a stack of them; also the way back."""
    *count, rows, cols = shape
    return (*count, rows, cols) if direction == "row" else (*count, cols, rows)


def transposed(matrix: Tensor) -> Tensor:
    """A matrix, or each of a stack, transposed: a view."""
    return matrix.transpose(-2, -1)
