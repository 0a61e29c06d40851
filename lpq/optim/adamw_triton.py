"""The kernel of AdamW's step, with the moments in any two formats that have tiles in Triton.

A program decodes a tile of both moments, steps the parameter and encodes them again: nothing else is in memory.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lpq.kernels.triton import launch, programs
from lpq.kernels.triton.numbers import value_of, widen
from lpq.kernels.triton.tiles import block_amax, load_tile, place_of_tile, spread, store_values
from lpq.operations.stored_tile import StoredTile

ELEMENTS = 2048
"""The elements of a tile."""


@triton.jit
def _step(
    p, gradient, m_codes, m_scales, root_codes, root_scales, rows, cols,
    keep, toward, second, fresh, correct, eps, rate,
    READ_M: tl.constexpr, WRITE_M: tl.constexpr, M: tl.constexpr,
    READ_ROOT: tl.constexpr, WRITE_ROOT: tl.constexpr, ROOT: tl.constexpr,
    SHARE: tl.constexpr, BLOCK: tl.constexpr, MAXIMIZE: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, col = place_of_tile(cols, HIGH, WIDE)
    g = widen(load_tile(gradient, row, col, rows, cols, HIGH, WIDE))
    if MAXIMIZE:
        g = -g
    m = READ_M(m_codes, m_scales, row, col, rows, cols, M, HIGH, WIDE)
    root = READ_ROOT(root_codes, root_scales, row, col, rows, cols, ROOT, HIGH, WIDE)
    m = m + (g - m) * toward
    root = tl.sqrt_rn(root * root * second + g * g * fresh)
    x = widen(load_tile(p, row, col, rows, cols, HIGH, WIDE))
    x = x * keep - tl.div_rn(m, root * correct + eps) * rate
    store_values(p, x, row, col, rows, cols)
    WRITE_M(m, m_codes, m_scales, row, col, rows, cols, M)
    if SHARE > 0.0:
        least = spread(value_of(block_amax(root, HIGH, WIDE // BLOCK)) * SHARE, HIGH, WIDE)
        root = tl.where(root > 0, tl.maximum(root, least, propagate_nan=tl.PropagateNan.ALL), root)
    WRITE_ROOT(root, root_codes, root_scales, row, col, rows, cols, ROOT)


def launch_step(
    p: Tensor, gradient: Tensor, m: Sequence[Tensor], root: Sequence[Tensor], rows: int, cols: int,
    numbers: Sequence[float], maximize: bool, first: StoredTile, second: StoredTile, share: float,
) -> None:  # fmt: skip
    """Step a parameter that is not empty.

    Args:
        p: The parameter, in ``rows`` and ``cols``.
        gradient: Its gradient.
        m: The codes and scales of the first moment.
        root: The codes and scales of the root of the second moment.
        rows: The rows of the parameter as a matrix.
        cols: Its columns.
        numbers: The seven numbers of the kernel, in their order.
        maximize: Whether the gradient is negated.
        first: The functions of the first moment.
        second: The functions of the second moment.
        share: The least share of a block's largest root that is kept; 0: all are.
    """
    wide = max(first.width, second.width, 128)
    high = max(ELEMENTS // wide, 1)
    launch(
        _step, programs((rows, cols), high, wide), p, gradient, m[0].view(torch.uint8), m[1],
        root[0].view(torch.uint8), root[1], rows, cols, *numbers,
        READ_M=first.read, WRITE_M=first.write, M=first.options,
        READ_ROOT=second.read, WRITE_ROOT=second.write, ROOT=second.options,
        SHARE=share, BLOCK=second.width, MAXIMIZE=maximize, HIGH=high, WIDE=wide, num_warps=4,
    )  # fmt: skip
