"""MS-EDEN, for the operands of backward: 128 columns are rotated by signs that each pass draws, elements are rounded to
the nearest, and each block's scale is rounded stochastically after it was corrected for the length that its group lost.

The matrix that is decoded is the matrix on average, over the signs and the roundings of scales. Only one random number
is drawn for a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpq.formats.blocks import block_amax, scale_blocks
from lpq.formats.elements import E4M3, cast_e2m1, cast_float8, decode_e2m1, decode_float8, pack_nibbles
from lpq.formats.rotation import Rotation
from lpq_nvfp4.reference import BLOCKS, E2M1_MAX, E4M3_MAX, GROUP, factor_of, tensor_scale, with_room

if TYPE_CHECKING:
    from lpq.core import RandomBits

ROTATED = 128
"""Columns that are rotated, and corrected, together."""
DRAWN = Rotation(drawn=ROTATED)
LARGEST = E2M1_MAX / (0.93 * 17 / 16)
"""The element that the amax of a block becomes: the one with which, of normally distributed values, least is lost."""
LARGEST_SCALE = 255.99
"""The scale of the block that has the amax of the rotated matrix, so that a correction finds room above it."""
SPREAD = 4
"""How many times the amax of the matrix the amax of the rotated one may be, as an element is a sum of 128 with random
signs: one that is 7 times the amax, from which scales saturate, has a chance below 1e-10."""
ROOM = SPREAD * E2M1_MAX * E4M3_MAX / (LARGEST_SCALE * LARGEST)
"""The amax of an operand, of the amax of the matrix."""
LARGEST_CODE = 0x7E
ONE_CODE = 0x38
"""The code of 1 in E4M3: the scale of a block whose scale would be 0."""
BYTES = 3
"""How many of a block's random bytes make its random number, the first one the lowest."""


def why_not(*sides: Any) -> str | None:
    """The kernels of all other options neither rotate 128 columns nor correct scales."""
    eden = next((side for side in sides if side is not None and side.eden), None)
    return None if eden is None else f"rotates no {ROTATED} columns: {eden} does"


def why_not_this(first: Any, second: Any = None) -> str | None:
    """The kernels of MS-EDEN serve one operand."""
    if not first.eden or second is not None:
        return "serves one operand of stochastic=eden at a time"
    return None


def encode(y: Tensor, amax: Tensor, bits: RandomBits) -> tuple[Tensor, Tensor, Tensor]:
    """Packed elements, block scales and the amax of the operand, of a rotated matrix. ``amax``: of the matrix before it
    was rotated."""
    rows, cols = y.shape
    block, amax = BLOCKS["1x16"], with_room(amax, ROOM)
    overall = tensor_scale(amax)
    found = cast_float8((block_amax(y, block) * (overall * (1 / LARGEST))).clamp(max=E4M3_MAX), E4M3)
    found = found.view(torch.uint8)
    scale = decode_float8(torch.where(found == 0, ONE_CODE, found).view(E4M3))
    z = scale_blocks(y, factor_of(scale, overall), block)
    code = cast_e2m1(z)
    q = decode_e2m1(code)
    over, under = summed(z * z), summed(z * q)
    correction = torch.where(under == 0, 1.0, over / under)
    drawn = bits.bytes(rows, cols).view(rows, cols // GROUP, GROUP)[:, :, :BYTES].float()
    number = drawn[:, :, 0] + drawn[:, :, 1] * 2**8 + drawn[:, :, 2] * 2**16
    corrected = (scale * correction.repeat_interleave(ROTATED // GROUP, 1)).clamp(max=E4M3_MAX)
    return pack_nibbles(code), rounded(corrected, number * 2 ** (-8 * BYTES)), amax


def summed(terms: Tensor) -> Tensor:
    """The sum of each 128: each 16 one after the other, and of these eight sums the halves, the quarters, the
    eighths."""
    rows, cols = terms.shape
    first, *rest = terms.view(rows, cols // ROTATED, ROTATED // GROUP, GROUP).unbind(-1)
    for term in rest:
        first = first + term
    while first.shape[-1] > 1:
        upper, lower = first.chunk(2, dim=-1)
        first = upper + lower
    return first[..., 0]


def rounded(scale: Tensor, chance: Tensor) -> Tensor:
    """The number of E4M3 below each scale, or the next one where ``chance``, from 0 on and below 1, is less than the
    part of the way that lies behind."""
    near = cast_float8(scale, E4M3)
    code = near.view(torch.uint8)
    below = torch.where(decode_float8(near) > scale, code - 1, code)
    lower, upper = (decode_float8(c.view(E4M3)) for c in (below, (below + 1).clamp(max=LARGEST_CODE)))
    up = (upper > lower) & (chance * (upper - lower) < scale - lower)
    return torch.where(up, below + 1, below).view(E4M3)
