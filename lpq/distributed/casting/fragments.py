"""The place of a fragment of a flattened weight in the buffers and statistics of the weight. Host arithmetic only.

Everything is in the order of the weight: row by row. The buffers of a row operand lie so, and those of a column operand
once they are transposed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lpq.formats.format import Direction
from lpq.formats.layout import Covering

Span = tuple[int, int]
"""Elements ``[start, stop)`` of a flattened weight."""


@dataclass(frozen=True)
class Grid:
    """A buffer, or a statistic, of one operand of a weight ``[rows, cols]``, in the order of the weight. A place in it
    is the place of a number, and a block may have several numbers."""

    covering: Covering
    direction: Direction
    rows: int
    cols: int

    @property
    def step(self) -> tuple[int | None, int | None]:
        """Rows and columns of the weight that one element covers."""
        down, across = self.covering.block
        return (down, across) if self.direction == "row" else (across, down)

    @property
    def shape(self) -> tuple[int, int]:
        """How many blocks lie below each other, and side by side."""
        size = (self.rows, self.cols) if self.direction == "row" else (self.cols, self.rows)
        down, across = self.covering.lattice(*size)
        return (down, across) if self.direction == "row" else (across, down)

    @property
    def values(self) -> int:
        """How many numbers each block has."""
        return self.covering.values or 1

    @property
    def count(self) -> int:
        return math.prod(self.shape) * self.values

    @property
    def reach(self) -> int:
        """The largest distance, in the flattened weight, of two elements that one block covers."""
        down, across = self.step[0] or self.rows, self.step[1] or self.cols
        return (down - 1) * self.cols + across - 1

    def holding(self, position: int) -> int:
        """The first place in the flattened grid of the block that covers this element of the flattened weight."""
        row, col = divmod(position, self.cols)
        down, across = self.step[0] or self.rows, self.step[1] or self.cols
        return (row // down * self.shape[1] + col // across) * self.values

    def before(self, position: int) -> int:
        """How many numbers of the grid begin before this element of the flattened weight.

        A fragment owns the numbers that begin in it, ``[before(start), before(stop))``, so that all fragments together
        own each number once. Numbers that pad the columns begin with the last column.
        """
        if position >= self.rows * self.cols:
            return self.count
        row, col = divmod(position, self.cols)
        width = self.shape[1]
        down, across = self.step[0] or self.rows, self.step[1] or self.cols
        return (-(-row // down) * width + (0 if row % down else -(-col // across))) * self.values

    def lay(self, tensor: Tensor) -> Tensor:
        """``[count, *grid]`` of operands, in the order of the weight: ``[count, *shape]``, and the values of each block
        if they are several."""
        if self.covering.block == (None, None):
            return tensor[:, None, None]
        return tensor if self.direction == "row" else tensor.transpose(1, 2)

    def lift(self, laid: Tensor) -> Tensor:
        """The inverse of ``lay``."""
        if self.covering.block == (None, None):
            return laid[:, 0, 0].contiguous()
        return (laid if self.direction == "row" else laid.transpose(1, 2)).contiguous()

    def spread(self, flat: Tensor) -> Tensor:
        """The result of ``lay``, from the numbers of each weight one after the other."""
        several = () if self.covering.values is None else (self.values,)
        return flat.view(-1, *self.shape, *several)
