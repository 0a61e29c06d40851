"""Products of decoded operands, for hardware that multiplies no encoded ones."""

from __future__ import annotations

import torch
from torch import Tensor


def product(left: Tensor, right: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``left @ rightᵀ + bias`` of two bf16 matrices on a GPU, summed in fp32, as ``dtype``."""
    if dtype == torch.bfloat16:
        return torch.nn.functional.linear(left, right, bias.to(dtype) if bias is not None else None)
    out = torch.mm(left, right.t(), out_dtype=torch.float32)
    return (out if bias is None else out.add_(bias)).to(dtype)


def scaled_product(
    left: Tensor,
    right: Tensor,
    of_left: Tensor | None,
    of_right: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``product`` of matrices each of which has a factor, for each of its rows or for all of it: it is applied to the
    sums, in fp32."""
    out = torch.mm(left, right.t(), out_dtype=torch.float32)
    if of_left is not None:
        out.mul_(of_left)
    if of_right is not None:
        out.mul_(of_right.t())
    return (out if bias is None else out.add_(bias)).to(dtype)
