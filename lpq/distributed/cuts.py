"""Whether a matrix that ranks share out is gathered before it is encoded, or after."""

from __future__ import annotations

import torch

from lpq.distributed.shardability import operand_bytes
from lpq.formats import Quantizer
from lpq.operations.cut import Cut

MOST = 1.1
"""The bytes of two operands of a tensor that are sent, at most, as a share of its own in high precision. Somewhat more
than those is still faster: the second operand travels while the first is multiplied, and each rank encodes its own part
alone. One operand by itself has at most the tensor's bytes."""


def why_high(
    quantizer: Quantizer, row: bool, col: bool, cut: Cut, rows: int, cols: int, dtype: torch.dtype
) -> str | None:
    """Why a tensor ``[rows, cols]`` whose rows the ranks share out is gathered before it is encoded, and not after;
    None if it is gathered encoded. It follows from sizes and layouts: all ranks decide alike. ``row`` and ``col``:
    whether these operands are wanted together."""
    side = quantizer.side("col")
    if quantizer.col_source == "row" and col and (side.state or side.stochastic):
        return f"{quantizer} makes its column operand of all that the row operand decodes to"
    reason = cut.why_not(quantizer, row, col)
    if reason is not None:
        return reason
    share = operand_bytes(quantizer, rows, cols, dtype, row, col) / max(rows * cols * dtype.itemsize, 1)
    if share <= (MOST if row and col else 1):
        return None
    return f"the operands that are wanted together would be {share:.2f} of that"
