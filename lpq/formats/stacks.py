"""Stacks: operands of several matrices of one size, one behind the other along a leading dimension.

A format is written for one matrix, and its layout is of one. The buffers of a stack are those of its matrices, stacked:
a buffer with a value for a whole matrix has one for each. So nothing of one matrix depends on another, and
a stack can be cut anywhere between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lpq.formats.format import Storage


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


def stacked(operands: Sequence[Storage]) -> Storage:
    """The stack of these operands of matrices, of one size and one quantizer, of which there is one at least."""
    first = operands[0]
    tensors = [torch.stack(buffers) for buffers in zip(*(o.tensors() for o in operands), strict=True)]
    return first.wrap(tensors, first.quantizer, (len(operands), *first.shape), first.dtype)


def each(function: Callable[[Storage], Storage], stack: Storage, empty: Callable[[], Storage]) -> Storage:
    """The stack of what ``function`` makes of each matrix; ``empty`` makes that of none."""
    return stacked([function(matrix) for matrix in matrices(stack)]) if stack.shape[0] else empty()


def transposed(matrix: Tensor) -> Tensor:
    """A matrix, or each of a stack, transposed: a view."""
    return matrix.transpose(-2, -1)
