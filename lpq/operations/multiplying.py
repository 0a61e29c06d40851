"""Gemm: the product of two operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from lpq.formats.format import Storage
from lpq.formats.layout import check_there
from lpq.operations.argument_checks import check_bias
from lpq.operations.binding import Multiply, Product, on_device
from lpq.operations.bound import product
from lpq.operations.decoding import decode
from lpq.operations.operators import can_call_directly, define
from lpq.operations.references import plain_gemm
from lpq.torch_private.dispatch import autocasts, modes


def gemm(
    a: Storage,
    b: Storage,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    fast_accumulate: bool = False,
    in_a_pass: bool = False,
) -> Tensor:
    """Compute ``decode(a) @ decode(b)ᵀ + bias``, summed in fp32.

    Args:
        a: The left operand, as ``t.row``.
        b: The right operand, with as many columns: both have the contraction along their columns.
        bias: One number for each row of ``b``, or None.
        dtype: The dtype of the result; None: the dtype of ``a``.
        fast_accumulate: Let a kernel sum in less than fp32 where the hardware offers that. The reference never does.
        in_a_pass: Whether one pass of a layer made both, so that rotations that are drawn are equal.
    """
    for operand in (a, b):
        if not isinstance(operand, Storage):
            raise TypeError(f"gemm multiplies operands, such as t.row and t.col, and not a {type(operand).__name__}")
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"gemm: the contractions differ: a is {list(a.shape)} and b is {list(b.shape)} "
            "(both operands have the contraction along their columns)"
        )
    dtype = dtype or a.dtype
    if not dtype.is_floating_point:
        raise TypeError(f"gemm: dtype={dtype} cannot hold a product: pass a floating one")
    first, second = a.tensors(), b.tensors()
    if first[0].device != second[0].device:
        raise ValueError(f"gemm: a is on {first[0].device} and b on {second[0].device}: move one to the other")
    if bias is not None:
        check_bias(bias, b.shape[0], first[0].device)
    basis = a.quantizer.basis
    if basis is not None and basis.drawn and not in_a_pass:
        left, right = (decode(operand, torch.float32) for operand in (a, b))
        return plain_gemm(left, right, bias, torch.float32).to(dtype)
    if a.quantizer.plain and b.quantizer.plain:
        if not torch.compiler.is_compiling():
            check_there(second[0])
        return plain_gemm(first[0], second[0], bias, dtype)
    how = (first, second, bias, a.text, b.text, a.shape, b.shape, a.dtype, b.dtype, dtype, fast_accumulate)
    if can_call_directly(first[0]):
        with on_device(first[0].device):
            return gemm_tensors(*how)
    return cast("Tensor", torch.ops.lpq.gemm(*how))


def gemm_tensors(
    a: list[Tensor], b: list[Tensor], bias: Tensor | None, qa: str, qb: str, shape_a: Sequence[int],
    shape_b: Sequence[int], dtype_a: torch.dtype, dtype_b: torch.dtype, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    """The operator's body. Compiled code calls it in place of the operator."""
    device = a[0].device
    if autocasts() and torch.is_autocast_enabled(device.type):  # it would round what the reference multiplies
        with torch.autocast(device.type, enabled=False):
            return gemm_tensors(a, b, bias, qa, qb, shape_a, shape_b, dtype_a, dtype_b, dtype, fast_accumulate)
    check_there(a[0])
    check_there(b[0])
    left, right = (qa, len(a), tuple(shape_a), dtype_a), (qb, len(b), tuple(shape_b), dtype_b)
    return product(left, right, dtype, device, fast_accumulate, modes() > 0)(a, b, bias)


define(
    "gemm(Tensor[] a, Tensor[] b, Tensor? bias, str qa, str qb, SymInt[] shape_a, SymInt[] shape_b, "
    "ScalarType dtype_a, ScalarType dtype_b, ScalarType dtype, bool fast_accumulate) -> Tensor",
    gemm_tensors,
    lambda a, b, bias, qa, qb, shape_a, shape_b, dtype_a, dtype_b, dtype, fast_accumulate: a[0].new_empty(
        (shape_a[0], shape_b[0]), dtype=dtype
    ),
    on_device,
)


def product_through_operators(p: Product) -> Multiply:
    """Make the same product from an operator."""
    a, b, dtype, fast = p.a, p.b, p.dtype, p.fast_accumulate

    def multiply(left: Sequence[Tensor], right: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return gemm(a.storage(left), b.storage(right), bias=bias, dtype=dtype, fast_accumulate=fast, in_a_pass=True)

    return multiply
