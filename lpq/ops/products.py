"""Products of bf16 matrices that stand for encoded ones, for hardware that multiplies no encoded ones."""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.ops import cublaslt
from lpq.ops.cuda import CudaKernel
from lpq.ops.tiles import pointer

SCALARS = CudaKernel("common/alpha.cu", "alpha_beta", "PPfP", threads=1, waits=True)
BIASED = 8
"""cuBLASLt adds a bias before it rounds where the rows of operands and result are multiples of this many elements.
Elsewhere it was seen to round twice."""
ALIGNED = 16
"""Of a bias that cuBLASLt adds, the bytes."""


def sums(left: Tensor, right: Tensor) -> Tensor:
    """``left @ rightᵀ`` of two bf16 matrices on a GPU, in fp32."""
    return torch.mm(left, right.t(), out_dtype=torch.float32)


def product(left: Tensor, right: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``left @ rightᵀ + bias`` of two bf16 matrices on a GPU, summed in fp32, as ``dtype``."""
    if dtype == torch.bfloat16:
        return torch.nn.functional.linear(left, right, bias.to(dtype) if bias is not None else None)
    out = sums(left, right)
    return (out if bias is None else out.add_(bias)).to(dtype)


def scaled_product(
    left: Tensor,
    right: Tensor,
    of_left: Tensor | None,
    of_right: Tensor | None,
    constant: float,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``product`` of matrices of which one at least has a factor, for each of its rows or for all of it. Factors are
    applied to the sums, in fp32, and a constant with them, which costs one more pass over them (two, if each row of
    both has one)."""
    made = sums(left, right)
    if of_left is not None and of_right is not None and of_left.dim() and of_right.dim():
        made.mul_(of_left)
        of_left = None
    factor = made.new_full((), constant)
    for each in (of_left, of_right.t() if of_right is not None else None):
        factor = factor if each is None else factor * each
    out = made.new_empty(made.shape, dtype=dtype)
    return torch.mul(made, factor, out=out) if bias is None else torch.addcmul(bias.float(), made, factor, out=out)


def product_with_alpha(
    left: Tensor,
    right: Tensor,
    of_left: Tensor | None,
    of_right: Tensor | None,
    constant: float,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``scaled_product`` for factors of whole matrices: the sums are scaled before they are written."""
    scalars = left.new_empty(2, dtype=torch.float32)
    SCALARS.launch(left.get_device(), (), 1, pointer(of_left), pointer(of_right), constant, scalars.data_ptr())
    if dtype == torch.bfloat16 and (bias is None or not any(size % BIASED for size in right.shape)):
        bias = _aligned(bias.to(dtype)) if bias is not None else None
        return cublaslt.multiply(left, right, scalars, bias, dtype)
    out = cublaslt.multiply(left, right, scalars, None, torch.float32)
    return (out if bias is None else out.add_(bias)).to(dtype)


def _aligned(bias: Tensor) -> Tensor:
    return bias.contiguous() if bias.data_ptr() % ALIGNED == 0 else bias.clone()
