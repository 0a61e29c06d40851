"""FP8's kernels for fragments of many matrices."""

from __future__ import annotations

from functools import cache

from lpq.kernels.fragments import CastKernels, cast_kernels
from lpq_fp8.quantizer import FP8Quantizer

MEASURE, SCALES, CODES = cast_kernels("fp8/cast.cu")


@cache
def cast(side: FP8Quantizer) -> CastKernels:
    """The kernels for operands of this quantizer."""
    blocks = int(side.scaling == "block")
    macros = f"LPQ_CODE={side.dtype.upper()}", f"LPQ_POW2={int(side.pow2_scales)}", f"LPQ_BLOCKS={blocks}"
    return CastKernels(MEASURE, SCALES, CODES, macros, turned=(8, 32) if side.transposable else ())
