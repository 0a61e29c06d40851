"""Where a fragment of a flattened weight lies in the buffers and statistics of the weight. Host arithmetic only.

Everything is in the order of the weight: row by row. The buffers of a row operand lie so; those of a column operand
do when they are transposed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from lpq.formats import Quantizer
from lpq.formats.format import Direction
from lpq.formats.layout import Covering, blocks

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

    def line(self, row: int) -> int:
        """The row of the grid that covers a row of the weight."""
        down = self.step[0]
        return 0 if down is None else row // down

    def holding(self, position: int) -> int:
        """The first place in the flattened grid of the block that covers this element of the flattened weight."""
        row, col = divmod(position, self.cols)
        across = self.step[1]
        return (self.line(row) * self.shape[1] + (0 if across is None else col // across)) * self.values

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

    def cut(self, laid: Tensor, band: Band) -> list[Tensor]:
        """Return, from a stack of this grid for many weights, the lines that cover a band, weight by weight."""
        lines = blocks(band.height, self.step[0])
        return [laid[i, self.line(top) : self.line(top) + lines] for i, top in zip(band.which, band.tops, strict=True)]


def reach(grids: Iterable[Grid]) -> int:
    """The largest distance, in the flattened weight, of two elements that share a code in one of these buffers."""
    furthest = 0
    for grid in grids:
        down, across = grid.step[0] or grid.rows, grid.step[1] or grid.cols
        furthest = max(furthest, (down - 1) * grid.cols + across - 1)
    return furthest


def alignment(row: Quantizer | None, col: Quantizer | None) -> int:
    """The number of rows of the weight that must stay together for all buffers and statistics of these operands."""
    units: list[int | None] = []
    for side, dim in ((row, 0), (col, 1)):
        if side is not None:
            units += [b.unit(dim) for b in side.layout] + [s.block[dim] for s in side.stats]
    return math.lcm(*(unit for unit in units if unit is not None))


@dataclass(frozen=True)
class Band:
    """Fragments that are encoded together, each in ``height`` whole rows of its weight that cover it."""

    which: tuple[int, ...]
    """The weights to which they belong."""
    tops: tuple[int, ...]
    """The first of the rows in each weight."""
    height: int


def bands(spans: Sequence[Span], rows: int, cols: int, unit: int, most: int, *, level: bool) -> Iterator[Band]:
    """Bands over fragments of weights ``[rows, cols]``, of whole units of rows; none over an empty fragment.

    A band that holds a last, ragged unit ends where the weight ends, since the padding of a buffer is not the code of
    zeros. A band has at most ``most`` elements, unless one weight alone has more. ``level``: all begin at the same row.
    """
    inner: list[tuple[int, int, int]] = []
    ragged: list[tuple[int, int, int]] = []
    for i, (start, stop) in enumerate(spans):
        if start < stop:
            top = start // cols // unit * unit
            bottom = blocks((stop - 1) // cols + 1, unit) * unit
            (inner if bottom <= rows else ragged).append((i, top, bottom))
    for found, end in ((inner, rows // unit * unit), (ragged, rows)):
        if not found:
            continue
        first = min(top for _, top, _ in found)
        if level or found is ragged:
            height = min(max(bottom for _, _, bottom in found), end) - first
            tops = [first for _ in found]
        else:
            height = max(bottom - top for _, top, bottom in found)
            tops = [min(top, end - height) for _, top, _ in found]
        count = max(1, most // (height * cols))
        for at in range(0, len(found), count):
            which = tuple(i for i, _, _ in found[at : at + count])
            yield Band(which, tuple(tops[at : at + count]), height)
