"""Matrices that the ranks of a mesh share out, along their rows or their columns.

A rank encodes its part with the statistics of the whole, and with the random bits that belong to the part's place. So a
part has the very bytes that the whole has there, and parts that are gathered are the whole operand, bit for bit. All of
it follows from the declared layout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lpq.distributed.shardability import operand_bytes, why_cut
from lpq.formats import Quantizer

MOST = 1.1
"""The bytes of two operands of a tensor that are sent, at most, as a share of its own in high precision. Somewhat more
than those is still faster: the second operand travels while the first is multiplied, and each rank encodes its own part
alone. One operand by itself has at most the tensor's bytes."""


class Cut(NamedTuple):
    """How the ranks share out a matrix: equally."""

    dim: int
    """0: each rank has some of its rows; 1: some of its columns."""
    rank: int
    ranks: int
    size: int
    """How many rows or columns one stretch has; they lie side by side in the whole matrix."""
    stretches: int = 1
    """How many stretches each rank has. The ranks take turns: one stretch each, then the next. A batch of sequences has
    one for each sequence."""

    @property
    def mine(self) -> int:
        """How many rows or columns this rank has."""
        return self.size * self.stretches

    def place(self, stretch: int) -> int:
        """The first row or column, in the whole matrix, of a stretch of this rank."""
        return (stretch * self.ranks + self.rank) * self.size

    def why_not(self, quantizer: Quantizer, row: bool, col: bool) -> str | None:
        """Why these operands cannot be encoded part by part; None if they can. It is the same on all ranks."""
        derived = col and quantizer.col_source == "row"  # the column operand is made of the row operand
        sides = [(quantizer.side("row"), self.dim)] if row or derived else []
        sides += [(quantizer.side("col"), 1 - self.dim)] if col else []
        return why_cut(sides, self.size, "rows" if self.dim == 0 else "columns")


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
