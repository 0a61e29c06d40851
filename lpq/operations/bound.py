"""Encodings and products of one shape, bound: kernels, launches and memory are decided beforehand, and a call bypasses
PyTorch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from lpq.kernels import choose
from lpq.kernels.table import bound_once
from lpq.operations import fused_pair
from lpq.operations.binding import (
    OUT_ALIGNED,
    Encoded,
    Encoding,
    Multiply,
    Operand,
    Product,
    Run,
    aligned,
    by_reference,
    called,
    rounded,
)
from lpq.operations.format_calls import encoded_by
from lpq.operations.inputs import as_matrix
from lpq.operations.references import gemm_reference, plain_gemm
from lpq.operations.sides import quantizer_of, serving, shared

# ---------------------------------------------------------------------------------------------- what encodes


def bind_run(e: Encoding) -> Run:
    """Choose and bind one kernel for both operands, one for each, or the reference."""
    row, col = e.row, e.col
    if e.exact != (False, False):
        return aligned(fused_pair.bind, e)
    if (row is not None and row.plain) or (col is not None and col.plain):
        return rounded(_with_plain, e)
    if row is None and col is None:
        return lambda x, stats, seed: ((), (), ())
    choice = serving("quantize", row, col, e.device)
    if choice is None:
        return _one_at_a_time(e)
    if choice.bind is None:
        impl = choice.impl if choice.impl is None or e.held is e.dtype else choice.rounding(e.dtype)
        return by_reference(e) if impl is None else called(impl, e)
    reads = e.held is e.dtype or (e.held is torch.float32 and choice.kernel is not None and choice.kernel.rounds)
    return aligned(choice.bind, e) if reads else rounded(partial(aligned, choice.bind), e)


def _one_at_a_time(e: Encoding) -> Run:
    """Encode each operand by the kernel that serves it: none takes both."""
    count = len(e.row.stats) if e.row is not None else 0
    first = bind_run(e._replace(col=None, given=e.given[:count]))
    second = bind_run(e._replace(row=None, given=e.given[count:]))

    def run(x: Tensor, stats: Sequence[Tensor | None], seed: Tensor | None) -> Encoded:
        row, _, measured = first(x, stats[:count], seed)
        _, col, more = second(x, stats[count:], seed)
        return row, col, (*measured, *more)

    return run


def _with_plain(e: Encoding) -> Run:
    """Make an encoding with an operand that is an ordinary matrix, which has no statistics."""
    row, col = (side if side is not None and side.plain else None for side in (e.row, e.col))
    both = shared(row, col)
    others = e._replace(row=None if row is not None else e.row, col=None if col is not None else e.col)
    rest = bind_run(others) if others.row is not None or others.col is not None else None

    def run(x: Tensor, stats: Sequence[Tensor | None], seed: Tensor | None) -> Encoded:
        x = as_matrix(x)
        of_row, of_col, measured = rest(x, stats, seed) if rest is not None else ((), (), ())
        if row is not None:
            of_row = encoded_by(row, x, {}, None).tensors()
        if both:
            of_col = [of_row[0].t()]  # one cast serves both
        elif col is not None:
            of_col = encoded_by(col, x.t(), {}, None).tensors()
        return of_row, of_col, measured

    return run


# ---------------------------------------------------------------------------------------------- what multiplies


def bind_product(p: Product) -> Multiply:
    """Choose and bind the kernel of a product."""
    a, b, dtype, fast = p.a, p.b, p.dtype, p.fast_accumulate
    if a.quantizer.plain and b.quantizer.plain:
        return lambda left, right, bias: plain_gemm(left[0], right[0], bias, dtype)
    choice = choose("gemm", (a.quantizer.text, b.quantizer.text), p.device)
    bound = choice.bind(p) if choice.bind is not None else None
    if bound is not None:
        return bound
    impl = gemm_reference if choice.bind is not None else choice.impl or gemm_reference
    return lambda left, right, bias: impl(a.storage(left), b.storage(right), bias, dtype, fast)


def bind_writing(p: Product) -> Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | None, Tensor], None]:
    """Bind a product that is written to a given matrix, which is contiguous: ``write(a, b, bias, out)``. It is written
    there at once if the kernel's function takes ``out``, and copied there otherwise."""
    multiply: Any = bind_product(p)
    direct = "out" in signature(multiply).parameters

    def write(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None, out: Tensor) -> None:
        into = {"out": out} if direct and out.data_ptr() % OUT_ALIGNED == 0 else {}
        y = multiply(a, b, bias, **into)
        if y is not out:
            out.copy_(y)

    return write


# ---------------------------------------------------------------------------------------------- by shape, for operators

OperandKey = tuple[str, int, tuple[int, ...], torch.dtype]
"""An operand as an operator is given it: its ``Storage.text``, how many tensors, its shape and its dtype."""
NEITHER = False, False
"""No operand is made in its exact form."""


@bound_once
def encoding(
    row: str, col: str, shape: torch.Size, x_dtype: torch.dtype, dtype: torch.dtype, device: torch.device,
    flags: tuple[bool, ...], offset: int, measure: bool, exact: tuple[bool, bool], dispatched: bool,
) -> Run:  # fmt: skip
    """An encoding that is bound to this shape and these options; what it returns an operator may return."""
    return bind_run(Encoding(
        quantizer_of(row), quantizer_of(col), (shape[0], shape[1]), x_dtype, dtype, device,
        flags if True in flags else (), measure, offset, exact, apart=True, dispatched=dispatched,
    ))  # fmt: skip


@bound_once
def product(
    a: OperandKey, b: OperandKey, dtype: torch.dtype, device: torch.device, fast: bool, dispatched: bool
) -> Multiply:
    """A product of these operands, bound."""
    return bind_product(Product(Operand.of_text(*a), Operand.of_text(*b), dtype, device, fast, dispatched))
