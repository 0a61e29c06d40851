"""How a program in Triton reads and writes a tile of a row operand, such as the state of an optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lpq.formats.format import Quantizer
from lpq.kernels.table import optional

ALIGNMENT = 16
"""The bytes of the widest access to memory. Rows are read so if their columns are a multiple of it, too."""


class StoredTile(NamedTuple):
    """How a format's codes and scales become values of a tile, and values codes and scales. Both buffers are row-major,
    and the operand has no others."""

    read: Any
    """``read(codes, scales, row, col, rows, cols, OPTIONS, HIGH, WIDE)``, a function in Triton: the values of the tile
    that begins at this row and column, in fp32, and zero outside of the matrix."""
    write: Any
    """``write(values, codes, scales, row, col, rows, cols, OPTIONS)``: it encodes values in fp32 as the reference does.
    """
    options: int
    """The options of the quantizer, as the two functions read them."""
    width: int
    """The columns of a block, which is one row high; a power of two. A tile has whole blocks."""


def stored_tile(quantizer: Quantizer, device: torch.device) -> StoredTile | None:
    """The functions of a row operand on this device; None where there are none."""
    impl = optional("stored_tile", quantizer, device)
    return None if isinstance(impl, str) else impl(quantizer)
