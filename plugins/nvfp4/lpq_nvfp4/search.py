"""Searching the scale of a block: the scale whose elements come closest to the block, in place of the scale of its
amax. Errors are added in fp32, in an order that depends on the places in the block alone. So the scale is a function of
the block and of the amax of the matrix, however a matrix is cut, and a block that is not finite keeps the scale of its
amax.

``searched`` takes the best of all scales: squares of the errors in units of the scale of the whole matrix, and the
largest of equally good scales. ``four_over_six`` takes the better of two as TransformerEngine does: errors in units of
the matrix, and of equally good scales the one of 6.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lpq.formats.blocks import pad_blocks, scale_blocks
from lpq.formats.elements import E4M3, cast_e2m1, cast_float8, decode_e2m1, decode_float8
from lpq.formats.layout import Block
from lpq_nvfp4 import eden
from lpq_nvfp4.reference import E2M1_MAX, E4M3_MAX, GROUP, factor_of

LARGEST_CODE = 0x7E
"""The code of 448; the codes from 1 to it are the 126 positive finite numbers of E4M3."""
HALF = GROUP // 2


def why_not(*sides: Any) -> str | None:
    """The kernels take the scale of a block's amax, or the better of two where they round to the nearest."""
    if (reason := eden.why_not(*sides)) is not None:
        return reason
    searching = next((side for side in sides if side.search == "mse" or (side.searches and side.stochastic)), None)
    if searching is None:
        return None
    also = ", nor any that are rounded stochastically" if searching.stochastic else ""
    return f"does not search all scales{also}: {searching} does"


def four_over_six(
    x: Tensor, _: Tensor, amaxes: Tensor, overall: Tensor, block: Block, *, amax: Tensor, norm: int, absolute: bool
) -> Tensor:
    """For each block the scale that takes its amax to 6, or to 4 where the error is less. ``amax``: of the matrix
    or of its rows, which becomes 6 times ``norm``. ``absolute``: the error is the sum of magnitudes, else of squares.
    """
    base = amaxes / torch.full_like(amaxes, E2M1_MAX) * overall
    scales, errors = [], []
    for larger in (1.0, 1.5):
        scale = cast_float8((base * larger).clamp(max=E4M3_MAX), E4M3)
        value = decode_float8(scale)
        code = cast_e2m1(scale_blocks(x, factor_of(value, overall), block))
        whole = scale_blocks(decode_e2m1(code), value, block) * amax
        error = whole / torch.full_like(whole, E2M1_MAX * norm) - x
        scales.append(scale.view(torch.uint8))
        errors.append((_in_squares if block[0] == GROUP else _in_rows)(error.abs() if absolute else error.square()))
    return torch.where(errors[1] < errors[0], scales[1], scales[0]).view(E4M3)


def _in_rows(errors: Tensor) -> Tensor:
    """The sum of each 16 of a row, one after the other."""
    errors = pad_blocks(errors, (1, GROUP))
    rows, cols = errors.shape
    return _in_order(errors.view(rows, cols // GROUP, GROUP))


def _in_squares(errors: Tensor) -> Tensor:
    """Twice the sum of each 16x16, which is the transposed block's, too: of each quarter its rows and its columns."""
    errors = pad_blocks(errors, (GROUP, GROUP))
    rows, cols = errors.shape
    quarters = errors.view(rows // HALF, HALF, cols // HALF, HALF)
    by_rows, by_columns = (_in_order(_in_order(quarters.permute(order))) for order in ((0, 2, 1, 3), (0, 2, 3, 1)))
    (first, right), (left, last) = (
        half.unbind(2) for half in (by_rows + by_columns).view(rows // GROUP, 2, cols // GROUP, 2).unbind(1)
    )
    return (first + last) + (right + left)


def _in_order(values: Tensor) -> Tensor:
    """The sum along the last dimension, one after the other."""
    first, *rest = values.unbind(-1)
    for value in rest:
        first = first + value
    return first


def searched(x: Tensor, scale: Tensor, amaxes: Tensor, overall: Tensor, block: Block) -> Tensor:
    """The best of all scales in place of ``scale``, which has the scales of the ``amaxes`` of the blocks of ``x``."""
    if x.numel() == 0:
        return scale
    wanted = x.float() * overall
    best, least = scale.clone(), torch.full_like(amaxes, torch.inf)
    for number in range(LARGEST_CODE, 0, -1):
        candidate = torch.full_like(scale.view(torch.uint8), number).view(E4M3)
        value = decode_float8(candidate)
        code = cast_e2m1(scale_blocks(x, factor_of(value, overall), block))
        error = _sum_of_blocks((scale_blocks(decode_e2m1(code), value, block) - wanted).square(), block)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, candidate.view(torch.uint8), best.view(torch.uint8)).view(E4M3)
    return best


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
