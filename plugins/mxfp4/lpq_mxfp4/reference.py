"""MXFP4 in plain PyTorch: this is what defines the format.

A block is 32 elements along the contraction. Its scale is a power of two, stored as a biased exponent ``e``; its
elements are ``x · 2^(127 - e)`` as E2M1, that is 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign, two of them in a byte.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lpq.formats.blocks import block_amax, pad_blocks, scale_blocks, with_exact_scales
from lpq.formats.elements import (
    decode_e2m1_pairs,
    decode_e8m0,
    inverse_e8m0,
    pack_nibbles,
    rounded_to_e2m1,
)

GROUP = 32
"""Columns are stored in whole groups of this many; a block is one group."""
BLOCK = (1, GROUP)
LARGEST_EXPONENT = 2
"""Of E2M1, whose largest power of two is 4."""
E2M1_MAX = 6.0
NAN = 255
RULES = {"floor": 0, "even": 0x200000, "ceil": 0x3FFFFF}
"""By the rule of scales, what is added to the bits of an amax before its exponent is taken. An amax of 8 times a scale,
of 7 times it, or of more than 6 times it gets the next scale."""


def measure(x: Tensor) -> Tensor:
    """The largest magnitude of each block."""
    return block_amax(x, BLOCK)


def exponents(amax: Tensor, rule: str) -> Tensor:
    """The biased exponents of blocks with these amaxes: at least 0, and 255, which means NaN, for one that is not
    finite."""
    exponent = (amax.view(torch.int32) + RULES[rule] >> 23) - LARGEST_EXPONENT
    return torch.where(amax.isfinite(), exponent.clamp(min=0), NAN).to(torch.uint8)


def encode(x: Tensor, amax: Tensor, rule: str, cast: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Packed elements and exponents. ``cast`` rounds fp32 to E2M1; the padding of columns is 0."""
    exponent = exponents(amax, rule)
    codes = cast(scale_blocks(x, inverse_e8m0(exponent), BLOCK))
    return pack_nibbles(pad_blocks(codes, BLOCK)), exponent


def decode(data: Tensor, exponent: Tensor) -> Tensor:
    """The matrix in fp32, padding columns included, exactly but for subnormal numbers."""
    return scale_blocks(decode_e2m1_pairs(data), decode_e8m0(exponent), BLOCK)


def unrounded(x: Tensor, amax: Tensor) -> Tensor:
    """The matrix if scales were not rounded."""
    return with_exact_scales(x, amax, BLOCK, E2M1_MAX, rounded_to_e2m1)
