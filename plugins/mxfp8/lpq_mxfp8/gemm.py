"""MXFP8's product on Blackwell: torch's scaled matmul. Elsewhere it is made in bf16, as any."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from lpq.emulation.bf16_gemm import gemm
from lpq.kernels.blackwell_scales import swizzled
from lpq_mxfp8.quantizer import MXFP8Quantizer
from lpq_mxfp8.reference import BLOCK
from lpq_mxfp8.storage import MXFP8Storage

ALIGNED = 16
"""The scaled matmul takes a multiple of this many rows of the second operand."""


def why_not(a: MXFP8Quantizer, b: MXFP8Quantizer) -> str | None:
    """Say why no hardware multiplies elements of these two; the scales do not matter."""
    if a.dtype == b.dtype == "e5m2":
        return "no hardware multiplies E5M2 by E5M2: let one operand be E4M3"
    return None


def native(a: MXFP8Storage, b: MXFP8Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Multiply as the reference does. Shapes that the scaled matmul refuses are multiplied in bf16."""
    (rows, inner), cols = a.shape, b.shape[0]
    if inner % BLOCK[1] or cols % ALIGNED or 0 in (rows, inner, cols):
        return gemm(a, b, bias, dtype)
    narrow = dtype == torch.bfloat16
    out = scaled_mm(
        a.data.contiguous(),
        b.data.contiguous().t(),
        _scales(a), ScalingType.BlockWise1x32,
        _scales(b), ScalingType.BlockWise1x32,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        bias=bias.to(dtype) if bias is not None and narrow else None,
        output_dtype=dtype if narrow else torch.float32,
    )  # fmt: skip
    return out if narrow else (out if bias is None else out.add_(bias)).to(dtype)


def _scales(operand: MXFP8Storage) -> Tensor:
    return swizzled(operand.scale).view(torch.float8_e8m0fnu)
