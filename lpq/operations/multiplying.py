"""Gemm: the product of two operands."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from lpq.formats.format import Storage
from lpq.formats.layout import check_there
from lpq.kernels import choose
from lpq.operations.argument_checks import unfit_bias
from lpq.operations.decoding import decode
from lpq.operations.exact_form import operand_of
from lpq.operations.operators import can_call_directly, define


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
    if bias is not None and (getattr(bias, "shape", None) != (b.shape[0],) or bias.device != first[0].device):
        raise unfit_bias(bias, b.shape[0], first[0].device)
    basis = a.quantizer.basis
    if basis is not None and basis.drawn and not in_a_pass:
        left, right = (decode(operand, torch.float32) for operand in (a, b))
        return plain_gemm(left, right, bias, torch.float32).to(dtype)
    if a.quantizer.plain and b.quantizer.plain:
        if not torch.compiler.is_compiling():
            check_there(second[0])
        return plain_gemm(first[0], second[0], bias, dtype)
    if can_call_directly(first[0]):
        check_there(first[0])
        check_there(second[0])
        return _product(a, b, bias, dtype, fast_accumulate, first[0].device)
    return cast(
        "Tensor",
        torch.ops.lpq.gemm(
            first, second, bias, a.text, b.text,
            a.shape, b.shape, a.dtype, b.dtype, dtype, fast_accumulate,
        ),
    )  # fmt: skip


def plain_gemm(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    common = torch.promote_types(a.dtype, b.dtype)
    bias = bias.to(common) if bias is not None else None
    product = torch.nn.functional.linear(a.to(common), b.to(common), bias)
    # torch.compile of torch 2.11 loses the gradient of a product that is cast to the dtype it has.
    return product if product.dtype == dtype else product.to(dtype)


def gemm_reference(
    a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool = False
) -> Tensor:
    """Compute ``decode(a) @ decode(b)ᵀ + bias``, summed in fp32 whatever ``fast_accumulate`` allows."""
    if a.quantizer.basis == b.quantizer.basis:  # a rotation of both drops out of the product
        left, right = a.decode_rotated(), b.decode_rotated()
    else:
        left, right = a.decode(), b.decode()
    product = left.float() @ right.float().t()
    if bias is not None:
        product += bias.float()
    return product.to(dtype)


def _product(
    a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool, device: torch.device
) -> Tensor:
    impl = choose("gemm", (a.quantizer.text, b.quantizer.text), device).impl or gemm_reference
    product: Tensor = impl(a, b, bias, dtype, fast_accumulate)
    return product


def _gemm(
    a: list[Tensor], b: list[Tensor], bias: Tensor | None, qa: str, qb: str, shape_a: list[int], shape_b: list[int],
    dtype_a: torch.dtype, dtype_b: torch.dtype, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    left, right = operand_of(a, qa, shape_a, dtype_a), operand_of(b, qb, shape_b, dtype_b)
    return _product(left, right, bias, dtype, fast_accumulate, a[0].device)


define(
    "gemm(Tensor[] a, Tensor[] b, Tensor? bias, str qa, str qb, SymInt[] shape_a, SymInt[] shape_b, "
    "ScalarType dtype_a, ScalarType dtype_b, ScalarType dtype, bool fast_accumulate) -> Tensor",
    _gemm,
    lambda a, b, bias, qa, qb, shape_a, shape_b, dtype_a, dtype_b, dtype, fast_accumulate: a[0].new_empty(
        (shape_a[0], shape_b[0]), dtype=dtype
    ),
)
