"""Products of rows in groups, each by a matrix of its own, and sums of them; ``offs`` is as in ``groups``.

The references compute a group at a time, as separate layers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.format import Quantizer, Storage, check_there
from lpq.formats.groups import Grouped, bounds, starts, unit
from lpq.formats.stacks import matrices
from lpq.operations import group_tiles, groups
from lpq.operations.exact_form import Multiplicand
from lpq.operations.group_choice import kernel_of
from lpq.operations.groups import without_the_host
from lpq.operations.multiplying import gemm
from lpq.operations.offsets import read
from lpq.operations.operators import can_call_directly, define


def multiply_rows(
    a: Grouped, b: Storage, offs: Tensor, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool
) -> Tensor:
    """Multiply the rows of each group by its matrix of the stack ``b``, ``[groups, N, K]``, and add its row of
    ``bias``. Rows of no group are zero."""
    first, second = list(a.tensors), b.tensors()
    if can_call_directly(first[0]):
        check_there(second[0])
        return _rows_product(a, b, offs, bias, dtype, fast_accumulate)
    return cast(
        "Tensor",
        torch.ops.lpq.multiply_rows(
            first, second, offs, bias, a.quantizer.text, b.quantizer.text, a.shape, b.shape, a.dtype, b.dtype, dtype,
            fast_accumulate,
        ),
    )  # fmt: skip


def _rows_product(
    a: Grouped, b: Storage, offs: Tensor, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool
) -> Tensor:
    sizes = b.shape[1], b.shape[2]
    if not groups.at_once(offs, offs) or not without_the_host(group_tiles.why_not_multiplied(*sizes)):
        return multiply_rows_reference(a, b, offs, bias, dtype, fast_accumulate)
    made = _by_kernel(a, b, offs, fast_accumulate)
    made = group_tiles.multiply_rows(a, b, offs) if made is None else made
    return group_tiles.in_rows(made, offs, bias, dtype)


def _by_kernel(a: Grouped, b: Storage | Grouped, offs: Tensor, fast_accumulate: bool) -> Tensor | None:
    """The product by a kernel of these formats; None if there is none, or it does not take these sizes."""
    if a.decoded or isinstance(b, Multiplicand) or (isinstance(b, Grouped) and b.decoded):
        return None
    impl = kernel_of(a.quantizer, b.quantizer, a.shape[a.dim], offs.device)
    made: Tensor | None = impl(a, b, offs, fast_accumulate) if impl is not None else None
    return made


def _columns_product(a: Grouped, b: Grouped, offs: Tensor, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    sizes = a.shape[0], b.shape[0]
    if not groups.at_once(offs, offs) or not without_the_host(group_tiles.why_not_multiplied(*sizes)):
        return multiply_columns_reference(a, b, offs, dtype, fast_accumulate)
    made = _by_kernel(a, b, offs, fast_accumulate)
    made = group_tiles.multiply_columns(a, b, offs) if made is None else made
    return group_tiles.of_groups(made, offs, dtype)


def multiply_rows_reference(
    a: Grouped, b: Storage, offs: Tensor, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool
) -> Tensor:
    """As separate products."""
    rows, ends = a.shape[0], read(offs, a.shape[0])
    out = a.tensors[0].new_zeros((rows, b.shape[1]), dtype=dtype)
    begins = starts(ends, unit(a.quantizer, 0))
    for group, (matrix, (start, stop)) in enumerate(zip(matrices(b), bounds(ends), strict=True)):
        if stop > start:
            left = a.matrix(group, start, stop, begins[group])
            added = None if bias is None else bias[group]
            out[start:stop] = gemm(left, matrix, bias=added, dtype=dtype, fast_accumulate=fast_accumulate)
    return out


def multiply_columns(a: Grouped, b: Grouped, offs: Tensor, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Multiply, for each group, its columns of ``a``, ``[N, rows]``, by those of ``b``, ``[K, rows]``: a stack
    ``[groups, N, K]``. The product of an empty group is zero."""
    first, second = list(a.tensors), list(b.tensors)
    if a.decoded or b.decoded or can_call_directly(first[0]):
        return _columns_product(a, b, offs, dtype, fast_accumulate)
    return cast(
        "Tensor",
        torch.ops.lpq.multiply_columns(
            first, second, offs, a.quantizer.text, b.quantizer.text, a.shape, b.shape, a.dtype, b.dtype, dtype,
            fast_accumulate,
        ),
    )  # fmt: skip


def multiply_columns_reference(
    a: Grouped, b: Grouped, offs: Tensor, dtype: torch.dtype, fast_accumulate: bool
) -> Tensor:
    """As separate products."""
    ends = read(offs, a.shape[1])
    out = a.tensors[0].new_zeros((len(ends), a.shape[0], b.shape[0]), dtype=dtype)
    left, right = (starts(ends, unit(operand.quantizer, 1)) for operand in (a, b))
    for group, (start, stop) in enumerate(bounds(ends)):
        if stop > start:
            first, second = a.matrix(group, start, stop, left[group]), b.matrix(group, start, stop, right[group])
            out[group] = gemm(first, second, dtype=dtype, fast_accumulate=fast_accumulate)
    return out


def _grouped(tensors: Sequence[Tensor], text: str, shape: Sequence[int], dtype: torch.dtype, dim: int) -> Grouped:
    rows, cols = shape
    return Grouped(registry.quantizer(text), tensors, (rows, cols), dtype, dim)


def _rows(
    a: list[Tensor], b: list[Tensor], offs: Tensor, bias: Tensor | None, qa: str, qb: str, shape_a: list[int],
    shape_b: list[int], dtype_a: torch.dtype, dtype_b: torch.dtype, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    side: Quantizer = registry.quantizer(qb)
    stack = side.storage.wrap(b, side, tuple(shape_b), dtype_b)
    return _rows_product(_grouped(a, qa, shape_a, dtype_a, 0), stack, offs, bias, dtype, fast_accumulate)


def _rows_fake(
    a: list[Tensor], b: list[Tensor], offs: Tensor, bias: Tensor | None, qa: str, qb: str, shape_a: list[int],
    shape_b: list[int], dtype_a: torch.dtype, dtype_b: torch.dtype, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    return a[0].new_empty((shape_a[0], shape_b[1]), dtype=dtype)


define(
    "multiply_rows(Tensor[] a, Tensor[] b, Tensor offs, Tensor? bias, str qa, str qb, SymInt[] shape_a, "
    "SymInt[] shape_b, ScalarType dtype_a, ScalarType dtype_b, ScalarType dtype, bool fast_accumulate) -> Tensor",
    _rows,
    _rows_fake,
)


def _columns(
    a: list[Tensor], b: list[Tensor], offs: Tensor, qa: str, qb: str, shape_a: list[int], shape_b: list[int],
    dtype_a: torch.dtype, dtype_b: torch.dtype, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    left, right = _grouped(a, qa, shape_a, dtype_a, 1), _grouped(b, qb, shape_b, dtype_b, 1)
    return _columns_product(left, right, offs, dtype, fast_accumulate)


def _columns_fake(
    a: list[Tensor], b: list[Tensor], offs: Tensor, qa: str, qb: str, shape_a: list[int], shape_b: list[int],
    dtype_a: torch.dtype, dtype_b: torch.dtype, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    return a[0].new_empty((offs.shape[0], shape_a[0], shape_b[0]), dtype=dtype)


define(
    "multiply_columns(Tensor[] a, Tensor[] b, Tensor offs, str qa, str qb, SymInt[] shape_a, SymInt[] shape_b, "
    "ScalarType dtype_a, ScalarType dtype_b, ScalarType dtype, bool fast_accumulate) -> Tensor",
    _columns,
    _columns_fake,
)

# ---------------------------------------------------------------------------------------------- summing


def sum_rows(x: Tensor, offs: Tensor) -> Tensor:
    """Sum the rows of each group; the sum of an empty one is zero."""
    return _sum(x, offs) if can_call_directly(x) else cast("Tensor", torch.ops.lpq.sum_rows(x, offs))


def _sum(x: Tensor, offs: Tensor) -> Tensor:
    if groups.at_once(x, offs):
        return group_tiles.sum_rows(x, offs)
    parts = [x[start:stop].sum(0) for start, stop in bounds(read(offs, x.shape[0]))]
    return torch.stack(parts) if parts else x.new_zeros((0, x.shape[1]))


def _sum_fake(x: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty((offs.shape[0], x.shape[1]))


define("sum_rows(Tensor x, Tensor offs) -> Tensor", _sum, _sum_fake)
