"""MXFP8 in plain PyTorch: this is what defines the format.

A block is 32 elements along the contraction. Its scale is a power of two, stored as a biased exponent ``e``;
its elements are ``x · 2^(127 - e)`` as 8-bit floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.formats.blocks import block_amax, scale_blocks, with_exact_scales
from lpq.formats.elements import E4M3, E5M2, cast_e8m0, cast_float8, decode_e8m0, decode_float8, inverse_e8m0

BLOCK = (1, 32)
ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2}


def measure(x: Tensor) -> Tensor:
    """The largest magnitude of each block."""
    return block_amax(x, BLOCK)


def encode(x: Tensor, amax: Tensor, element: torch.dtype) -> tuple[Tensor, Tensor]:
    """Elements and exponents. The scale is the least power of two that brings the block's amax into range.

    A block of zeros has exponent 0; a block with a NaN or an infinity has 255, and decodes to NaN.
    """
    exponent = cast_e8m0(amax * (1 / torch.finfo(element).max))
    return cast_float8(scale_blocks(x, inverse_e8m0(exponent), BLOCK), element), exponent


def decode(data: Tensor, exponent: Tensor) -> Tensor:
    """The matrix in fp32, exactly but for subnormal numbers."""
    return scale_blocks(decode_float8(data), decode_e8m0(exponent), BLOCK)


def unrounded(x: Tensor, amax: Tensor, element: torch.dtype) -> Tensor:
    """The matrix if scales were not rounded. No element is saturated: an amax is scaled to the largest value."""
    return with_exact_scales(x, amax, BLOCK, torch.finfo(element).max, lambda y: y.to(element).float())
