"""MXFP8's kernels for fragments of many matrices."""

from __future__ import annotations

from functools import cache

from lpq.kernels.fragments import CastKernels, cast_kernels
from lpq_mxfp8.quantizer import MXFP8Quantizer

MEASURE, SCALES, CODES = cast_kernels("mxfp8/cast.cu")


@cache
def cast(side: MXFP8Quantizer) -> CastKernels:
    """The kernels for operands of this quantizer."""
    return CastKernels(MEASURE, SCALES, CODES, (f"LPQ_CODE={side.dtype.upper()}",))
