"""Matrices that are divided over ranks, along their rows or their columns.

A rank encodes its part with the statistics of the whole, and with the random bits that belong to the part's place. So a
part has the very bytes that the whole has there, and parts that are gathered are the whole operand, bit for bit. All of
it follows from the declared layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lpq.formats.format import Quantizer


class Cut(NamedTuple):
    """How a matrix is divided over ranks: equally."""

    dim: int
    """0: each rank has some of its rows; 1: some of its columns."""
    rank: int
    ranks: int
    size: int
    """How many rows or columns one chunk has; they lie side by side in the whole matrix."""
    chunks_per_rank: int = 1
    """How many chunks each rank has. The ranks take turns: one chunk each, then the next. A batch of sequences has
    one for each sequence; of columns there is but one."""

    def place(self, chunk: int) -> int:
        """The first row or column, in the whole matrix, of a chunk of this rank."""
        if self.dim == 1 and self.chunks_per_rank > 1:
            raise ValueError(f"{self}: a rank's columns lie side by side, in one chunk: give chunks_per_rank=1")
        return (chunk * self.ranks + self.rank) * self.size

    def why_not(self, quantizer: Quantizer, row: bool, col: bool) -> str | None:
        """Why these operands cannot be encoded part by part; None if they can. It is the same on all ranks."""
        derived = col and quantizer.col_source == "row"  # the column operand is made of the row operand
        sides = [(quantizer.side("row"), self.dim)] if row or derived else []
        sides += [(quantizer.side("col"), 1 - self.dim)] if col else []
        return why_cut(sides, self.size, "rows" if self.dim == 0 else "columns")


def why_cut(sides: Iterable[tuple[Quantizer, int]], size: int, what: str) -> str | None:
    """Why operands cannot be cut every ``size`` rows or columns, along the dimension named for each; None if they can.
    ``what``: the noun for these rows or columns in the message."""
    for side, dim in sides:
        if (reason := side.why_no_parts(dim)) is not None:
            return reason
        for unit in side.units(dim):
            if size % unit:
                return f"shards of {size} {what} cut the blocks of {unit} of {side}"
    return None


def check_shard(row: Quantizer | None, col: Quantizer | None, rows: int) -> None:
    """Refuse equal shards of ``rows`` rows of which these operands are no parts of the operands of the whole. All ranks
    have equally many rows, so all refuse."""
    sides = [(side, dim) for side, dim in ((row, 0), (col, 1)) if side is not None]
    if (reason := why_cut(sides, rows, "rows")) is not None:
        raise ValueError(
            f"a shard has no operand that is a part of the whole tensor's: {reason}. Shard by whole blocks, or "
            "quantize the whole"
        )
