"""The random Hadamard transform, which spreads an outlier over its 16 neighbours along the contraction.

``y = x · diag(s) · H / 4``, with the Sylvester matrix H of order 16 and fixed signs s. It is orthonormal: the product
of two operands that are both rotated along the contraction stays the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.formats.blocks import pad_blocks

NAME = "hadamard16"
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
MINUS = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)


def rotate(x: Tensor) -> Tensor:
    """The rotated matrix in fp32, its columns padded to whole groups."""
    x = pad_blocks(x, (1, 16))
    return hadamard(x.float() * (_signs(x) * 0.25))


def unrotate(y: Tensor) -> Tensor:
    """The matrix that ``rotate`` would take to ``y``, padding included."""
    return hadamard(y * 0.25) * _signs(y)


def _signs(x: Tensor) -> Tensor:
    """The sign of each column. It comes from a constant, since copying a list to a GPU would wait for it."""
    column = torch.arange(x.shape[1], device=x.device)
    return (1 - 2 * (MINUS >> column % 16 & 1)).float()


def hadamard(x: Tensor) -> Tensor:
    """``x · H`` in fp32: sums and differences of elements 8 apart, then of those 4, 2 and 1 apart."""
    rows, cols = x.shape
    spare = torch.empty_like(x)
    for apart in (8, 4, 2, 1):
        pairs = (rows, cols // (2 * apart), 2, apart)
        first, second = x.view(pairs).unbind(2)
        total, difference = spare.view(pairs).unbind(2)
        torch.add(first, second, out=total)
        torch.sub(first, second, out=difference)
        x, spare = spare, x
    return x
