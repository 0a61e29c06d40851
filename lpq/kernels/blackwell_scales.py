"""The order in which Blackwell's block-scaled products read the scales of blocks.

Scales are read in tiles of 128 rows by 4 columns, 512 bytes each, one row of tiles after the other. In a tile four rows
that are 32 apart lie side by side: the scale at ``(row, col)`` is byte ``row % 32 · 16 + row // 32 · 4 + col``. Tiles
are whole; the padding is zero. torch calls this ``SwizzleType.SWIZZLE_32_4_4``.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, COLS = 128, 4
QUARTER = 32


def swizzled(scale: Tensor) -> Tensor:
    """A matrix of scales of one byte each in that order, flat, in its own dtype."""
    rows, cols = scale.shape
    down, across = -(-rows // ROWS), -(-cols // COLS)
    whole = scale.view(torch.uint8)
    if (rows, cols) != (down * ROWS, across * COLS):
        whole = torch.nn.functional.pad(whole, (0, across * COLS - cols, 0, down * ROWS - rows))
    tiles = whole.reshape(down, ROWS // QUARTER, QUARTER, across, COLS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scale.dtype)
