"""Products of any two formats through bf16, for hardware that multiplies no encoded operands.

A format says, by a ``KernelSpec`` for the operation ``exact``, how one operand of its is a bf16 matrix, without loss,
and a factor in fp32. With every other format that says so it is then multiplied by one bf16 product, whose sums get the
factors of both, and no pair of formats has code of its own. The operation has no reference: a format need not do this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lpq.core.multiplicand import Exact, Multiplicand
from lpq.core.operations import decode, gemm_reference
from lpq.core.operators import alone, once_when_traced
from lpq.core.storage import Storage
from lpq.ops import KernelError, choose, cublaslt
from lpq.ops.products import product, product_with_alpha, scaled_product
from lpq.ops.table import ANY_PAIR

if TYPE_CHECKING:
    from lpq.core.quantizer import Quantizer


def exact(operand: Storage) -> Exact | None:
    """The operand as a bf16 matrix and a factor, or None if its format cannot say that of an operand of its shape."""
    if isinstance(operand, Multiplicand):
        return operand.form
    impl = choose("exact", (operand.quantizer.text,), operand.device).impl
    found: Exact | None = impl(operand) if impl is not None else None
    return found


def decoded(operand: Storage) -> Exact:
    """``impl`` for a format that bf16 holds as it decodes: an element's bits and those of its scale are 8 at most."""
    return Exact(decode(operand, torch.bfloat16))


def serves(a: Quantizer, b: Quantizer, x: Tensor) -> bool:
    """Whether operands of these, one of which is made of ``x``, are multiplied by way of their exact forms. Where
    others look on than a compiler, they see encoded ones."""
    if torch.compiler.is_dynamo_compiling():
        return _serves(a.text, b.text, x.device)
    return alone(x) and choose("gemm", (a.text, b.text), x.device).kernel in ANY_PAIR


@once_when_traced
def _serves(a: str, b: str, device: torch.device) -> bool:
    try:
        return choose("gemm", (a, b), device).kernel in ANY_PAIR
    except KernelError:  # the product will say so
        return False


def why_not(a: Quantizer, b: Quantizer) -> str | None:
    """Both operands need an exact form, in the same basis."""
    if a.rotation != b.rotation:
        return f"{a} and {b} are stored in different bases, and what undoing a rotation gives is not exact in bf16"
    device = torch.device("cuda", torch.cuda.current_device())
    for quantizer in (a, b):
        try:
            choice = choose("exact", (quantizer.text,), device)
        except KernelError as error:
            return str(error)
        if choice.impl is None:
            reasons = "; ".join(reason for _, reason in choice.rejected)
            return f"{quantizer} has no exact form in bf16: {reasons or 'its plugin names none'}"
    return None


def why_not_alpha(a: Quantizer, b: Quantizer) -> str | None:
    """A factor on the device takes a call that torch does not make."""
    if cublaslt.library() is None:
        return "torch came without cuBLASLt"
    return why_not(a, b)


def gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool = False) -> Tensor:
    """As the reference, up to the order of sums. Factors are applied in a pass of their own."""
    return _gemm(a, b, bias, dtype, scaled_product)


def gemm_with_alpha(
    a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool = False
) -> Tensor:
    """As the reference, up to the order of sums. Factors of whole matrices are applied before sums are written."""
    return _gemm(a, b, bias, dtype, product_with_alpha)


def _gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, multiply: Callable[..., Tensor]) -> Tensor:
    left = right = None
    if 0 not in (*a.shape, *b.shape):
        left, right = exact(a), exact(b)
    if left is None or right is None or (left.rest is None) != (right.rest is None):
        return gemm_reference(a, b, bias, dtype)
    factors = [e.factor for e in (left, right) if e.factor is not None]
    constant = left.constant * right.constant
    if any(factor.dim() for factor in factors):
        multiply = scaled_product
    if left.rest is not None and right.rest is not None:
        out = multiply(left.matrix, right.matrix, left.factor, right.factor, constant, None, torch.float32)
        out.addmm_(left.rest, right.rest.t())
        return (out if bias is None else out.add_(bias)).to(dtype)
    if not factors:
        return product(left.matrix, right.matrix, bias, dtype)
    return multiply(left.matrix, right.matrix, left.factor, right.factor, constant, bias, dtype)
