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
