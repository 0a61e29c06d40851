"""Products of rows in groups, each by a matrix of its own, and sums of them; ``offs`` is as in ``groups``.

The references compute a group at a time, as separate layers do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.format import Storage
from lpq.formats.layout import check_there
from lpq.formats.sections import Sections, bounds, is_stack, matrices, starts, unit
from lpq.kernels.table import bound_once
from lpq.operations import group_tiles, groups
from lpq.operations.binding import Multiply, Operand, Product, on_device, operand_like
from lpq.operations.group_choice import choice_of
from lpq.operations.groups import tell_of_waiting
from lpq.operations.multiplying import gemm
from lpq.operations.offsets import read
from lpq.operations.operators import can_call_directly, define

Run = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""``run(a, b)`` of the buffers of two operands, to bf16; what belongs to no group has any values."""


def bind(p: Product) -> Multiply:
    """Bind a product of groups."""
    columns, (*_, wide, deep), at_once = bool(p.a.dim), p.b.shape, sections_of(p).at_once
    why = group_tiles.why_not_multiplied(*((p.a.shape[0], wide) if columns else (wide, deep))) if at_once else None
    run = (_by_kernel(p) or group_tiles.bind_product(p)) if at_once and why is None else None
    if run is None:

        def by_reference(left: Sequence[Tensor], right: Sequence[Tensor], bias: Tensor | None) -> Tensor:
            if why is not None:
                tell_of_waiting(why)
            return multiply_reference(p, left, right, bias)

        return by_reference
    finish = (group_tiles.bind_of_groups if columns else group_tiles.bind_in_rows)(p.dtype, p.device)

    def multiply(left: Sequence[Tensor], right: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return finish(run(left, right), left[-1], bias)

    return multiply


def through_operators(p: Product) -> Multiply:
    """Make the same product from an operator, but for columns that exist decoded only."""
    a, b = p.a, p.b
    if a.dim and (a.form is not None or b.form is not None):
        return bind(p)
    how = a.quantizer.text, b.quantizer.text, a.shape, b.shape, a.dtype, b.dtype, p.dtype, p.fast_accumulate

    def multiply(left: Sequence[Tensor], right: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        (*first, offs), second = left, list(right[:-1]) if a.dim else b.storage(right).tensors()
        return cast("Tensor", torch.ops.lpq.multiply_groups(first, second, offs, bias, *how))

    return multiply


def _by_kernel(p: Product) -> Run | None:
    """Bind the product to a kernel of these formats; None if there is no kernel, or it does not take these sizes."""
    a, b, fast = p.a, p.b, p.fast_accumulate
    if a.form is not None or b.form is not None:
        return None
    choice = choice_of(a.quantizer, b.quantizer, a.shape[a.dim], p.device)
    if choice is None or choice.impl is None:
        return None
    if choice.bind is not None:
        return choice.bind(p)
    impl, otherwise = choice.impl, group_tiles.bind_product(p)

    def run(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        product: Tensor | None = impl(a.grouped(left), b.grouped(right) if a.dim else b.storage(right), left[-1], fast)
        return otherwise(left, right) if product is None else product

    return run


_bound = bound_once(bind)


def groups_of(offs: Tensor) -> Sections:
    """The groups that end at these rows."""
    return Sections(len(offs), False, groups.at_once(offs, offs))


def sections_of(p: Product) -> Sections:
    """The groups of a product."""
    assert p.a.sections is not None
    return p.a.sections


def cached_by_shape(bind: Callable[[Product], Run | None]) -> Callable[..., Tensor | None]:
    """Make the ``impl`` of a ``grouped_gemm`` that binds. The bound functions of the last few shapes are kept."""
    bound = bound_once(bind)

    def grouped_gemm(a: Operand, b: Storage | Operand, offs: Tensor, fast_accumulate: bool) -> Tensor | None:
        """Multiply the rows of each group of ``a`` by its matrix of the stack ``b``, or the columns of each group of
        both. Return None where the kernel does not take such sizes."""
        how = groups_of(offs)
        left, right = (
            o._replace(sections=how, tensors=()) if isinstance(o, Operand) else operand_like(o) for o in (a, b)
        )  # fmt: skip
        run: Run | None = bound(Product(left, right, torch.bfloat16, offs.device, fast_accumulate, dispatched=True))
        if run is None:
            return None
        return run([*a.tensors, offs], [*b.tensors, offs] if isinstance(b, Operand) else b.tensors())

    return grouped_gemm


def multiply_reference(p: Product, left: Sequence[Tensor], right: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """As separate products: of the rows of each group, or of its columns of both operands."""
    a, columns = p.a.grouped(left), bool(p.a.dim)
    ends = read(left[-1], a.shape[a.dim])
    groups = [(i, start, stop) for i, (start, stop) in enumerate(bounds(ends)) if stop > start]
    if columns:
        b = p.b.grouped(right)
        out = left[0].new_zeros((len(ends), a.shape[0], b.shape[0]), dtype=p.dtype)
        begins = starts(ends, unit(b.quantizer, 1))
        others = {i: b.group(i, start, stop, begins[i]) for i, start, stop in groups}
    else:
        stack = p.b.storage(right)
        out = left[0].new_zeros((a.shape[0], stack.shape[1]), dtype=p.dtype)
        others = dict(enumerate(matrices(stack)))
    begins = starts(ends, unit(a.quantizer, a.dim))
    for i, start, stop in groups:
        part, own_bias = a.group(i, start, stop, begins[i]), None if bias is None else bias[i]
        product = gemm(part, others[i], bias=own_bias, dtype=p.dtype, fast_accumulate=p.fast_accumulate, in_a_pass=True)
        out[i if columns else slice(start, stop)] = product
    return out


def _multiply(
    a: list[Tensor], b: list[Tensor], offs: Tensor, bias: Tensor | None, qa: str, qb: str, shape_a: list[int],
    shape_b: list[int], dtype_a: torch.dtype, dtype_b: torch.dtype, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    check_there(b[0])
    stack, how = is_stack(shape_b), groups_of(offs)
    left = Operand(registry.quantizer(qa), tuple(shape_a), dtype_a, None, how, 0 if stack else 1)
    right = Operand(registry.quantizer(qb), tuple(shape_b), dtype_b, None, None if stack else how, left.dim)
    multiply: Multiply = _bound(Product(left, right, dtype, offs.device, fast_accumulate, dispatched=True))
    with on_device(offs.device):
        return multiply([*a, offs], b if stack else [*b, offs], bias)


def _multiply_fake(
    a: list[Tensor], b: list[Tensor], offs: Tensor, bias: Tensor | None, qa: str, qb: str, shape_a: list[int],
    shape_b: list[int], dtype_a: torch.dtype, dtype_b: torch.dtype, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    rows = shape_a[0], shape_b[-2]
    return a[0].new_empty(rows if is_stack(shape_b) else (offs.shape[0], *rows), dtype=dtype)


define(
    "multiply_groups(Tensor[] a, Tensor[] b, Tensor offs, Tensor? bias, str qa, str qb, SymInt[] shape_a, "
    "SymInt[] shape_b, ScalarType dtype_a, ScalarType dtype_b, ScalarType dtype, bool fast_accumulate) -> Tensor",
    _multiply,
    _multiply_fake,
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


define("sum_rows(Tensor x, Tensor offs) -> Tensor", _sum, lambda x, offs: x.new_empty((offs.shape[0], x.shape[1])))
