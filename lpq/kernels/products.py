"""Products of bf16 matrices that stand for encoded ones, for hardware that multiplies no encoded ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lpq.kernels import cublaslt
from lpq.kernels.cuda import CudaKernel
from lpq.kernels.fresh import allocator

SCALARS = CudaKernel("common/alpha.cu", "alpha_beta", "PPfP", threads=1, waits=True)
BIASED = 8
"""cuBLASLt adds a bias before it rounds where the rows of operands and result are multiples of this many elements.
Elsewhere it rounds twice."""
ALIGNED = 16
"""The alignment, in bytes, of a bias that cuBLASLt adds."""


def sums(left: Tensor, right: Tensor) -> Tensor:
    """``left @ rightᵀ`` of two bf16 matrices on a GPU, in fp32."""
    return torch.mm(left, right.t(), out_dtype=torch.float32)


def product(left: Tensor, right: Tensor, bias: Tensor | None, dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
    """``left @ rightᵀ + bias`` of two bf16 matrices on a GPU, summed in fp32, as ``dtype``; written to ``into`` where
    torch can do that."""
    if dtype == torch.bfloat16:
        bias = bias.to(dtype) if bias is not None else None
        if into is None:
            return torch.nn.functional.linear(left, right, bias)
        transposed = right.t()
        return torch.mm(left, transposed, out=into) if bias is None else torch.addmm(bias, left, transposed, out=into)
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
    into: Tensor | None = None,
) -> Tensor:
    """As ``product``, where at least one matrix has a factor for each row or for the whole matrix. Factors are applied
    to the sums, in fp32, and a constant with them, which costs one more pass over them (two, if each row of both has
    one)."""
    made = sums(left, right)
    if of_left is not None and of_right is not None and of_left.dim() and of_right.dim():
        made.mul_(of_left)
        of_left = None
    factor = made.new_full((), constant)
    for each in (of_left, of_right.t() if of_right is not None else None):
        factor = factor if each is None else factor * each
    out = made.new_empty(made.shape, dtype=dtype) if into is None else into
    return torch.mul(made, factor, out=out) if bias is None else torch.addcmul(bias.float(), made, factor, out=out)


def bind_product_with_alpha(
    device: torch.device,
    rows: int,
    cols: int,
    inner: int,
    bias: bool,
    dtype: torch.dtype,
    dispatched: bool,
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor | None, float, Tensor | None, Tensor | None], Tensor]:
    """``scaled_product`` of matrices ``[rows, inner]`` and ``[cols, inner]`` for factors of whole matrices: the sums
    are scaled before they are written. The device is the current one."""
    empty = allocator(device)
    find = SCALARS.bind(device.index or 0, (), 1)
    inside = dtype == torch.bfloat16 and not (bias and (cols % BIASED or inner % BIASED))
    multiply = cublaslt.bind(
        device, rows, cols, inner, dtype if inside else torch.float32, bias and inside, dispatched=dispatched
    )

    def run(
        left: Tensor, right: Tensor, of_left: Tensor | None, of_right: Tensor | None, constant: float,
        bias: Tensor | None, into: Tensor | None,
    ) -> Tensor:  # fmt: skip
        scalars = empty((2,), (1,), torch.float32)
        find(
            of_left.data_ptr() if of_left is not None else 0, of_right.data_ptr() if of_right is not None else 0,
            constant, scalars.data_ptr(),
        )  # fmt: skip
        if inside:
            return multiply(left, right, scalars, _aligned(bias.to(dtype)) if bias is not None else None, into)
        out = multiply(left, right, scalars, None, None)
        return (out if bias is None else out.add_(bias)).to(dtype)

    return run


def _aligned(bias: Tensor) -> Tensor:
    return bias.contiguous() if bias.data_ptr() % ALIGNED == 0 else bias.clone()
