"""FP8's products: torch's scaled matmul, which multiplies 8-bit floats where the hardware can, and bf16 elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, pad, scaled_mm

from lpq.core import decode
from lpq.core.exact import decoded
from lpq.core.exact import gemm as gemm_in_bf16
from lpq.core.multiplicand import Exact
from lpq_fp8.quantizer import FP8Quantizer
from lpq_fp8.storage import FP8Storage

ALIGNED = 16
"""The sizes of a product must be multiples of this, but for the rows of the first operand."""
SCALES_ALIGNED = 4
"""Of scales of 1x128 each column, and of 128x128 each row, must be a multiple of this many."""
SCALES = {"1x128": ScalingType.BlockWise1x128, "128x128": ScalingType.BlockWise128x128}


def why_not(a: FP8Quantizer, b: FP8Quantizer) -> str | None:
    """Both operands need one scale, or one for each row."""
    kinds = _kind(a), _kind(b)
    if kinds[0] == kinds[1] and kinds[0] in ("tensor", "row"):
        return _both_e5m2(a, b)
    return f"multiplies scales of the tensor or of rows, of both operands alike; these are of {' and '.join(kinds)}"


def blocks_why_not(a: FP8Quantizer, b: FP8Quantizer) -> str | None:
    """Both operands need scales of blocks, and one at least of 1x128."""
    kinds = _kind(a), _kind(b)
    if "1x128" in kinds and set(kinds) <= {"1x128", "128x128"}:
        return _both_e5m2(a, b)
    return f"multiplies blocks of 1x128 by blocks of 1x128 or 128x128; these scales are of {' and '.join(kinds)}"


def gemm(a: FP8Storage, b: FP8Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """As the reference. What the scaled matmul refuses is multiplied in bf16."""
    if not _fits(a, b):
        return gemm_in_bf16(a, b, bias, dtype)
    if _kind(a.quantizer) == "tensor":
        return _scaled_mm(a, b, a.scale, b.scale, bias, dtype, fast_accumulate)
    # For rows torch has a kernel of its own on GPUs that are not Hopper's, which serves less.
    if (dtype == torch.float32 or b.quantizer.dtype == "e5m2") and not _hopper(a.data.device):
        return gemm_in_bf16(a, b, bias, dtype)
    return _scaled_mm(a, b, a.scale, b.scale.t(), bias, dtype, fast_accumulate)


def gemm_of_blocks(
    a: FP8Storage, b: FP8Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool
) -> Tensor:
    """The same of scales of blocks, which are applied to sums in fp32: never fast."""
    uneven = a.quantizer.block == "1x128" and a.shape[0] % SCALES_ALIGNED > 0  # the rows of b are even, if it fits
    if uneven or not _fits(a, b):
        return gemm_in_bf16(a, b, bias, dtype)
    after = bias is not None and dtype == torch.float32
    out = scaled_mm(
        a.data, b.data.t(),
        _block_scales(a), SCALES[a.quantizer.block], _block_scales(b), SCALES[b.quantizer.block],
        bias=None if bias is None or after else bias.to(dtype), output_dtype=dtype,
    )  # fmt: skip
    return out.add_(bias) if after and bias is not None else out


def _both_e5m2(a: FP8Quantizer, b: FP8Quantizer) -> str | None:
    if a.dtype == b.dtype == "e5m2":
        return "no hardware multiplies E5M2 by E5M2: let one operand be E4M3"
    return None


def _fits(a: FP8Storage, b: FP8Storage) -> bool:
    (rows, inner), cols = a.shape, b.shape[0]
    return inner % ALIGNED == 0 and cols % ALIGNED == 0 and rows > 0 and inner > 0


def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _scaled_mm(
    a: FP8Storage, b: FP8Storage, left: Tensor, right: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    if bias is None:
        return torch._scaled_mm(a.data, b.data.t(), left, right, None, None, dtype, fast)
    if dtype == torch.float32:
        return torch._scaled_mm(a.data, b.data.t(), left, right, None, None, dtype, fast).add_(bias)
    return torch._scaled_mm(a.data, b.data.t(), left, right, bias.to(dtype), None, dtype, fast)


def _kind(quantizer: FP8Quantizer) -> str:
    if quantizer.scaling == "block":
        return quantizer.block
    return "row" if quantizer.scaling == "row" else "tensor"


def _block_scales(operand: FP8Storage) -> Tensor:
    """The scales as the scaled matmul reads them: of 1x128 blocks column by column, as encoding leaves them; of 128x128
    transposed, and for each line of blocks a multiple of 4 of them."""
    scale = operand.quantizer.layout[1].laid(operand.scale)
    if operand.quantizer.block == "1x128":
        return scale
    lacking = -scale.shape[1] % SCALES_ALIGNED
    return (pad(scale, (0, lacking)) if lacking else scale).t()


# ---------------------------------------------------------------------------------------------- in bf16


def exact_why_not(quantizer: FP8Quantizer) -> str | None:
    """An element is exact in bf16. So is its product with a block's scale, if that is a power of two."""
    if quantizer.scaling == "block" and not quantizer.pow2_scales:
        return "the scales of its blocks are no powers of two: what it decodes to is not exact in bf16"
    return None


def exact(operand: FP8Storage) -> Exact:
    """The elements, and as their factor a scale of the whole or of rows; or elements times the scales of blocks."""
    if operand.quantizer.scaling == "block":
        return decoded(operand)
    elements = FP8Storage(data=operand.data, scale=torch.ones_like(operand.scale))
    elements.bind(operand.quantizer, operand.shape, operand.dtype)
    return Exact(decode(elements, torch.bfloat16), operand.scale)
