"""Blocks of a matrix in plain PyTorch: a ragged edge behaves as if padded with zeros."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lpq.core.layout import Block, blocks


def pad_blocks(x: Tensor, block: Block) -> Tensor:
    """``x`` padded with zeros to whole blocks."""
    rows, cols = x.shape
    down = blocks(rows, block[0]) * (block[0] or rows) - rows
    right = blocks(cols, block[1]) * (block[1] or cols) - cols
    return F.pad(x, (0, right, 0, down)) if down or right else x


def block_amax(x: Tensor, block: Block) -> Tensor:
    """The largest magnitude of every block, fp32, NaN if the block has one; 0-dimensional for the whole matrix."""
    if block == (None, None):
        return x.abs().amax().float()
    x = pad_blocks(x, block)
    rows, cols = x.shape
    high, wide = block[0] or rows, block[1] or cols
    return x.abs().reshape(rows // high, high, cols // wide, wide).amax(dim=(1, 3)).float()


def expand_blocks(values: Tensor, block: Block, rows: int, cols: int) -> Tensor:
    """One value for each block as one value for each element of a matrix ``[rows, cols]``."""
    if block == (None, None):
        return values.expand(rows, cols)
    for dim, (step, size) in enumerate(zip(block, (rows, cols), strict=True)):
        if step is None:
            values = values.expand(*(size if d == dim else -1 for d in range(2)))
        elif step > 1:
            values = values.repeat_interleave(step, dim)
    return values[:rows, :cols]
