"""FP8's products: the scaled matmul of cuBLASLt or torch, which multiply 8-bit floats where the hardware can, and bf16
elsewhere. torch's call ends in cuBLASLt's, and takes the host three times as long."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, pad, scaled_mm

from lpq.core import decode
from lpq.emulation.bf16_gemm import bind as bind_in_bf16
from lpq.emulation.bf16_gemm import decoded
from lpq.kernels import cublaslt
from lpq.operations.binding import Multiply, Operand, Product, cached_product
from lpq.operations.exact_form import Exact
from lpq.torch_private.operators import scaled_matmul
from lpq_fp8.quantizer import FP8Quantizer
from lpq_fp8.reference import ELEMENTS
from lpq_fp8.storage import FP8Storage

ALIGNED = 16
"""The sizes of a product must be multiples of this, but for the rows of the first operand."""
SCALES_ALIGNED = 4
"""The length of each column of scales of 1x128, and of each row of 128x128, must be a multiple of this."""
SCALES = {"1x128": ScalingType.BlockWise1x128, "128x128": ScalingType.BlockWise128x128}
SCALED = {
    "tensor": cublaslt.OF_ALL, "row": cublaslt.OF_ROWS, "1x128": cublaslt.OF_1X128, "128x128": cublaslt.OF_128X128,
}  # fmt: skip


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


def bind(p: Product) -> Multiply | None:
    """Bind the product that the reference makes. One that the scaled matmul refuses is multiplied in bf16."""
    by_rows = _kind(p.a.quantizer) == "row"
    # For rows torch has a kernel of its own on GPUs that are not Hopper's, which serves less.
    unserved = by_rows and (p.dtype == torch.float32 or p.b.quantizer.dtype == "e5m2") and not _hopper(p.device)
    if unserved or not _fits(p):
        return bind_in_bf16(p)
    multiply, dtype, fast = scaled_matmul, p.dtype, p.fast_accumulate
    direct = _bind_direct(p, fast) if not by_rows or _hopper(p.device) else None

    def run(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if bias is None and direct is not None:
            of_a, of_b = (a[1].contiguous(), b[1].contiguous()) if by_rows else (a[1], b[1])
            made = direct(a[0], b[0], of_a, of_b, out)
            if made is not None:
                return made
        scale = b[1].t() if by_rows else b[1]
        if bias is None:
            return multiply(a[0], b[0].t(), a[1], scale, None, None, dtype, fast)
        if dtype == torch.float32:
            return multiply(a[0], b[0].t(), a[1], scale, None, None, dtype, fast).add_(bias)
        return multiply(a[0], b[0].t(), a[1], scale, bias.to(dtype), None, dtype, fast, out=out)

    return run


def bind_blocks(p: Product) -> Multiply | None:
    """As ``bind``, with scales of blocks, which are applied to sums in fp32: never fast."""
    uneven = p.a.quantizer.block == "1x128" and p.a.shape[0] % SCALES_ALIGNED > 0  # b's rows are even, if it fits
    if uneven or not _fits(p):
        return bind_in_bf16(p)
    (lay_a, turn_a), (lay_b, turn_b) = (_block_scales(operand.quantizer) for operand in (p.a, p.b))
    kinds = [SCALES[operand.quantizer.block] for operand in (p.a, p.b)]
    multiply, dtype, direct = scaled_mm, p.dtype, _bind_direct(p, False)

    def run(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        of_a, of_b = lay_a(a[1]), lay_b(b[1])
        if bias is None and direct is not None:
            made = direct(a[0], b[0], of_a, of_b, out)
            if made is not None:
                return made
        after = bias is not None and dtype == torch.float32
        made = multiply(
            a[0], b[0].t(), turn_a(of_a), kinds[0], turn_b(of_b), kinds[1],
            bias=None if bias is None or after else bias.to(dtype), output_dtype=dtype,
        )  # fmt: skip
        return made.add_(bias) if after and bias is not None else made

    return run


gemm, gemm_of_blocks = cached_product(bind), cached_product(bind_blocks)


def _bind_direct(
    p: Product, fast: bool
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor | None] | None:
    """The product by cuBLASLt's own call, without a bias; None where torch has another kernel for it."""
    (rows, inner), cols = p.a.shape, p.b.shape[0]
    scaled = SCALED[_kind(p.a.quantizer)], SCALED[_kind(p.b.quantizer)]
    return cublaslt.bind_scaled(
        p.device, rows, cols, inner, (_element(p.a), _element(p.b)), p.dtype, scaled, fast, dispatched=p.dispatched
    )


def _element(operand: Operand) -> torch.dtype:
    return ELEMENTS[operand.quantizer.dtype]


def _both_e5m2(a: FP8Quantizer, b: FP8Quantizer) -> str | None:
    if a.dtype == b.dtype == "e5m2":
        return "no hardware multiplies E5M2 by E5M2: let one operand be E4M3"
    return None


def _fits(p: Product) -> bool:
    (rows, inner), cols = p.a.shape, p.b.shape[0]
    return inner % ALIGNED == 0 and cols % ALIGNED == 0 and rows > 0 and inner > 0


def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _kind(quantizer: FP8Quantizer) -> str:
    if quantizer.scaling == "block":
        return quantizer.block
    return "row" if quantizer.scaling == "row" else "tensor"


def _block_scales(quantizer: FP8Quantizer) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Two functions: from scales to those that cuBLASLt reads, and from these to torch's. Scales of 1x128 blocks lie
    column by column, as encoding leaves them; scales of 128x128 blocks are padded to a multiple of 4 for each line of
    blocks, and transposed for torch."""
    laid = quantizer.layout[1].laid
    if quantizer.block == "1x128":
        return laid, lambda scale: scale

    def filled(scale: Tensor) -> Tensor:
        lacking = -scale.shape[1] % SCALES_ALIGNED
        if scale.stride() == (scale.shape[1] + lacking, 1):  # as a layer's encoding leaves them
            return scale
        return pad(laid(scale), (0, lacking)) if lacking else laid(scale)

    def transposed(scale: Tensor) -> Tensor:
        lacking = -scale.shape[1] % SCALES_ALIGNED
        return (pad(scale, (0, lacking)) if lacking else scale).t()

    return filled, transposed


# ---------------------------------------------------------------------------------------------- in bf16


def exact_why_not(quantizer: FP8Quantizer) -> str | None:
    """An element is exact in bf16. So is its product with a block's scale, if that is a power of two."""
    if quantizer.scaling == "block" and not quantizer.pow2_scales:
        return "the scales of its blocks are no powers of two: what it decodes to is not exact in bf16"
    return None


def exact(operand: FP8Storage) -> Exact | None:
    """The elements, and as their factor a scale of the whole or of rows; or elements times the scales of blocks."""
    if operand.quantizer.scaling == "block":
        return decoded(operand)
    elements = FP8Storage(data=operand.data, scale=torch.ones_like(operand.scale))
    elements.bind(operand.quantizer, operand.shape, operand.dtype)
    return Exact(decode(elements, torch.bfloat16), operand.scale)
