"""Searching the scale of a block: the scale whose elements come closest to the block, in place of the scale of its
amax. The error of a block is the sum of the squares of the rounding errors, in fp32, in units of the scale of the whole
matrix, and in an order that depends on the places in the block alone. So the scale is a function of the block and of
the amax of the matrix, however a matrix is cut. The largest of equally good scales is taken, and a block that is not
finite keeps the scale of its amax.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lpq.formats.blocks import pad_blocks, scale_blocks
from lpq.formats.elements import E4M3, cast_e2m1, cast_float8, decode_e2m1, decode_float8
from lpq.formats.layout import Block
from lpq_nvfp4.reference import E4M3_MAX, factor_of

LARGEST_CODE = 0x7E
"""The code of 448; the codes from 1 to it are the 126 positive finite numbers of E4M3."""
SMALLER_MAX = 4.0
"""The element that the amax of a block may become in place of 6: between 4 and 6 there is nothing."""


def why_not(*sides: Any) -> str | None:
    """The kernels take the scale of a block's amax."""
    searching = next((side for side in sides if side.search != "amax"), None)
    return None if searching is None else f"searches no scales, as {searching} does"


def searched(x: Tensor, scale: Tensor, amaxes: Tensor, overall: Tensor, block: Block, search: str) -> Tensor:
    """The scales in place of ``scale``, which has the scales of the ``amaxes`` of the blocks of ``x``."""
    if x.numel() == 0:
        return scale
    wanted = scale_blocks(x, overall, (None, None))
    best, least = scale.clone(), torch.full_like(amaxes, torch.inf)
    for candidate in _candidates(scale, amaxes, overall, search):
        value = decode_float8(candidate)
        code = cast_e2m1(scale_blocks(x, factor_of(value, overall), block))
        error = _sum_of_blocks((scale_blocks(decode_e2m1(code), value, block) - wanted).square(), block)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, candidate.view(torch.uint8), best.view(torch.uint8)).view(E4M3)
    return best


def _candidates(scale: Tensor, amaxes: Tensor, overall: Tensor, search: str) -> Iterator[Tensor]:
    """For each block a scale to try, the larger ones first."""
    if search == "mse":
        for code in range(LARGEST_CODE, 0, -1):
            yield torch.full_like(scale.view(torch.uint8), code).view(E4M3)
    else:
        yield cast_float8((amaxes * (overall * (1 / SMALLER_MAX))).clamp(max=E4M3_MAX), E4M3)
        yield scale


def _sum_of_blocks(values: Tensor, block: Block) -> Tensor:
    """The sum of each block, by halves: torch's own may add in another order where the matrix has another shape."""
    values = pad_blocks(values, block)
    high, wide = block[0] or 1, block[1] or 1
    rows, cols = values.shape
    values = values.reshape(rows // high, high, cols // wide, wide)
    if high == wide:
        values = values + values.transpose(1, 3)  # so that the transposed block has this sum, twice, as well
    for dim in (3, 1):
        while values.shape[dim] > 1:
            first, second = values.chunk(2, dim)
            values = first + second
    return values.reshape(rows // high, cols // wide)
