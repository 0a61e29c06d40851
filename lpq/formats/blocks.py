"""Blocks of a matrix in plain PyTorch: sizes that do not fill a block are padded with zeros. A transposed view is
processed in its memory order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lpq.formats.layout import Block, blocks


def pad_blocks(x: Tensor, block: Block) -> Tensor:
    """``x`` padded with zeros to whole blocks.

    Args:
        x: A matrix.
        block: The rows and the columns of a block; None: the whole dimension, which needs no padding.
    """
    rows, cols = x.shape
    down = blocks(rows, block[0]) * (block[0] or rows) - rows
    right = blocks(cols, block[1]) * (block[1] or cols) - cols
    return F.pad(x, (0, right, 0, down)) if down or right else x


INFINITY = 0x7F800000
"""The bits of infinity in fp32; NaN has larger bits."""
NAN = 0x7FC00000
"""The bits of the NaN of ``torch.nan`` in fp32."""


def block_amax(x: Tensor, block: Block) -> Tensor:
    """The largest magnitude of each block in fp32, NaN if it has one; 0-dimensional for the whole matrix.

    Args:
        x: A matrix of any floating dtype, with any strides.
        block: The rows and the columns of a block; None: the whole dimension. Ragged blocks count as padded by zeros.
    """
    # The bits of non-negative floats order as the floats do, NaN above infinity, and integers reduce faster.
    bits = x.float().abs().view(torch.int32)
    amax = (bits.amax() if block == (None, None) else _amax(bits, block)).view(torch.float32)
    return torch.where(amax.isnan(), torch.nan, amax)  # one NaN for all, whatever the payload


def traced_amax(x: Tensor) -> Tensor | None:
    """``block_amax`` of a whole matrix ``x``, for a compiler to trace; None for a dtype that it cannot do without.

    A compiler that makes ``x`` in the same pass may take its elements before they are rounded to bf16. So the amax is
    rounded, which gives the same: rounding keeps the order. That is done in integers, since a compiler takes away a
    cast to bf16 and back. The rows are reduced first: a pass that makes rows then has them.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        return None
    bits = x.float().abs().view(torch.int32).amax(1).amax()
    rounded = rounded_to_bfloat16(bits) if x.dtype == torch.bfloat16 else bits
    # Not by torch.nan: a compiler that merges equal operators finds it equal to nothing.
    return torch.where(bits > INFINITY, NAN, rounded).view(torch.float32)


def rounded_to_bfloat16(bits: Tensor) -> Tensor:
    """The ``bits`` of non-negative fp32 numbers, rounded to bf16: to the nearest, ties to even."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF


def _amax(bits: Tensor, block: Block) -> Tensor:
    if _is_transposed(bits):
        return _amax(bits.t(), block[::-1]).t().contiguous()
    return _blocked(bits, block).amax(1).amax(2)


def scale_blocks(x: Tensor, values: Tensor, block: Block) -> Tensor:
    """``x`` times the value (fp32) of each element's block, in fp32.

    Args:
        x: A matrix of any floating dtype, with any strides.
        values: One for each block, below and beside each other as ``block_amax`` has them.
        block: The rows and the columns of a block; None: the whole dimension.
    """
    x = x.float()
    if block == (None, None):
        return x * values
    if _is_transposed(x):
        return scale_blocks(x.t(), values.t(), block[::-1]).t()
    rows, cols = x.shape
    scaled = _blocked(x, block) * values.contiguous()[:, None, :, None]
    return scaled.flatten(2).flatten(0, 1)[:rows, :cols]


def with_exact_scales(
    x: Tensor, amaxes: Tensor, block: Block, largest: float, rounded: Callable[[Tensor], Tensor]
) -> Tensor:
    """The matrix in fp32, its elements ``rounded`` under exact scales, which take a block's amax to ``largest``.

    Args:
        x: The matrix.
        amaxes: The amax of each block, in fp32, as ``block_amax`` has them.
        block: The rows and the columns of a block; None: the whole dimension.
        largest: The largest magnitude of an element type, as 6 of E2M1.
        rounded: Rounds fp32 numbers to the element type, and keeps them in fp32.
    """
    scale = amaxes * (1 / largest)
    factor = scale.clamp(min=torch.finfo(torch.float32).tiny).reciprocal()
    return scale_blocks(rounded(scale_blocks(x, factor, block)), scale, block)


def expand_blocks(values: Tensor, block: Block, rows: int, cols: int) -> Tensor:
    """One value for each block as one value for each element of a matrix ``[rows, cols]``.

    Args:
        values: One for each block, as ``block_amax`` has them. The result may be a view of them.
        block: The rows and the columns of a block; None: the whole dimension.
        rows: The rows of the matrix, whose last block may be ragged.
        cols: Its columns, likewise.
    """
    if block == (None, None):
        return values.expand(rows, cols)
    for dim, (step, size) in enumerate(zip(block, (rows, cols), strict=True)):
        if step is None:
            values = values.expand(*(size if d == dim else -1 for d in range(2)))
        elif step > 1:
            values = values.repeat_interleave(step, dim)
    return values[:rows, :cols]


def _is_transposed(x: Tensor) -> bool:
    return x.stride(0) < x.stride(1)


def _blocked(x: Tensor, block: Block) -> Tensor:
    """``x`` as ``[blocks down, rows of a block, blocks across, columns of a block]``."""
    x = pad_blocks(x, block)
    rows, cols = x.shape
    high, wide = block[0] or max(rows, 1), block[1] or max(cols, 1)
    return x.view(rows // high, high, cols // wide, wide)
