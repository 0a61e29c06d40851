"""NVFP4's kernels for fragments of many matrices."""

from __future__ import annotations

from functools import cache

from lpq.kernels.fragments import CastKernels, cast_kernels
from lpq_nvfp4 import search
from lpq_nvfp4.quantizer import NVFP4Quantizer

MEASURE, SCALES, CODES = cast_kernels("nvfp4/cast.cu")


def why_not(side: NVFP4Quantizer) -> str | None:
    """It rounds to the nearest, in the basis of the matrix."""
    if (searching := search.why_not(side)) is not None:
        return searching
    if side.rht:
        return "serves operands in the matrix's own basis: a rotated one needs elements of all fragments"
    return "rounds to the nearest, not stochastically" if side.stochastic else None


@cache
def cast(side: NVFP4Quantizer) -> CastKernels:
    """The kernels for operands of this quantizer."""
    return CastKernels(MEASURE, SCALES, CODES, (), turned=(4, 8, 32) if side.transposable else ())
