"""FP8's product by torch's scaled matmul, which multiplies 8-bit floats where the hardware can."""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.core.operations import gemm_reference
from lpq_fp8.quantizer import FP8Quantizer
from lpq_fp8.storage import FP8Storage

ALIGNED = 16
"""The sizes of a product must be multiples of this, but for the rows of the first operand."""
BLOCK = 128


def why_not(a: FP8Quantizer, b: FP8Quantizer) -> str | None:
    """Both operands need scales of kinds that the scaled matmul takes together."""
    if a.dtype == b.dtype == "e5m2":
        return "no hardware multiplies E5M2 by E5M2: let one operand be E4M3"
    kinds = (_kind(a), _kind(b))
    if kinds[0] == kinds[1] != "128x128" or set(kinds) == {"1x128", "128x128"}:
        return None
    return f"no scaled matmul takes scales of kinds {kinds[0]} and {kinds[1]} together"


def gemm(a: FP8Storage, b: FP8Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """As the reference, which also serves shapes that the scaled matmul refuses."""
    (rows, inner), cols = a.shape, b.shape[0]
    kind = _kind(a.quantizer)
    fits = rows > 0 and inner > 0 and inner % ALIGNED == cols % ALIGNED == 0
    if "x128" in kind:
        # Versions of torch differ in how scales of 128x128 lie in memory, unless their number is a multiple of 4.
        square = "128x128" in (kind, _kind(b.quantizer))
        fits = fits and inner % (4 * BLOCK if square else BLOCK) == 0 and rows % ALIGNED == 0
    if not fits:
        return gemm_reference(a, b, bias, dtype, fast_accumulate)
    if kind == "tensor":
        left, right = a.scale, b.scale
    elif kind == "row":
        left, right = a.scale, b.scale.t()
    else:
        left, right = _block_scales(a), _block_scales(b).t()
        fast_accumulate = False  # the sums of blocks are scaled in fp32
    if bias is not None and dtype == torch.float32:
        return _scaled_mm(a, b, left, right, None, dtype, fast_accumulate).add_(bias)
    return _scaled_mm(a, b, left, right, bias, dtype, fast_accumulate)


def _scaled_mm(
    a: FP8Storage, b: FP8Storage, left: Tensor, right: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    bias = bias.to(dtype) if bias is not None else None
    return torch._scaled_mm(
        a.data, b.data.t(), scale_a=left, scale_b=right, bias=bias, out_dtype=dtype, use_fast_accum=fast
    )


def _kind(quantizer: FP8Quantizer) -> str:
    if quantizer.scaling == "block":
        return quantizer.block
    return "row" if quantizer.scaling == "row" else "tensor"


def _block_scales(operand: FP8Storage) -> Tensor:
    """The scales as the scaled matmul reads them: of 1x128 blocks the rows next to each other."""
    return operand.scale.t().contiguous().t() if operand.quantizer.block == "1x128" else operand.scale
