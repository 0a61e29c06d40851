"""Kinds of weights: the properties that weights share when they are cast together, and which decide how they are
cast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lpq.distributed.casting.fragments import Grid, Span
from lpq.formats import Quantizer
from lpq.formats.format import Direction
from lpq.operations.derived_operands import derives_col, rounds_stochastically
from lpq.tensor import QuantizedTensor

HEAD = 4
"""Words before the elements of a fragment: where it begins and where it ends, each as a row and a column."""


def in_fragments(side: Quantizer) -> bool:
    """Whether fragments can be encoded one by one, as the format declares."""
    mixed = side.uncut or side.rotation is not None or any(s.reduce != "max" or s.round > 1 for s in side.stats)
    return side.plain or (not mixed and any(buffer.from_stats for buffer in side.layout))


@dataclass(frozen=True)
class Kind:
    """Weights ``[rows, cols]`` that differ in their values only."""

    quantizer: Quantizer
    holds_row: bool
    holds_col: bool
    rows: int
    cols: int
    dtype: torch.dtype
    remembers: bool
    """Whether each has a state, which gives the statistics to encode with and takes those of this cast."""

    @cached_property
    def derives(self) -> bool:
        """Whether column operands follow from row operands."""
        return self.holds_col and derives_col(self.quantizer)

    @cached_property
    def row(self) -> Quantizer | None:
        """The quantizer of row operands, which are needed also where column operands follow from them."""
        return self.quantizer.side("row") if self.holds_row or self.derives else None

    @cached_property
    def col(self) -> Quantizer | None:
        """The quantizer of column operands, if they do not follow from row operands."""
        return self.quantizer.side("col") if self.holds_col and not self.derives else None

    @cached_property
    def sides(self) -> list[tuple[Direction, Quantizer]]:
        """The operands that are encoded, and their quantizers."""
        sides: list[tuple[Direction, Quantizer | None]] = [("row", self.row), ("col", self.col)]
        return [(direction, side) for direction, side in sides if side is not None]

    @cached_property
    def stats(self) -> list[Grid]:
        """The statistics that these operands need, in the order of ``operations.declared``."""
        return [Grid(stat, d, self.rows, self.cols) for d, side in self.sides for stat in side.stats]

    def stats_of(self, direction: Direction) -> slice:
        """The places of one operand's statistics in that order."""
        found = [i for i, grid in enumerate(self.stats) if grid.direction == direction]
        return slice(found[0], found[-1] + 1) if found else slice(0)

    def coded(self, direction: Direction, side: Quantizer) -> dict[int, Grid]:
        """The buffers of an operand that depend on the elements, by their place in the layout."""
        grids = {j: Grid(buffer, direction, self.rows, self.cols) for j, buffer in enumerate(side.layout)}
        return {j: grid for j, grid in grids.items() if not side.layout[j].from_stats}

    @cached_property
    def reach(self) -> int:
        """The largest distance, in the flattened weight, of two elements that share a code."""
        grids = [grid for d, side in self.sides for grid in self.coded(d, side).values()]
        return min(max((grid.reach for grid in grids), default=0), self.rows * self.cols)

    @cached_property
    def stochastic(self) -> bool:
        return rounds_stochastically(self.quantizer)

    @cached_property
    def in_fragments(self) -> bool:
        """Whether fragments can be encoded one by one."""
        return all(in_fragments(side) for _, side in self.sides)

    def in_parts(self, ranks: int) -> bool:
        """Whether they are encoded so: the ranks then exchange less than all elements."""
        return ranks > 1 and self.in_fragments and 2 * self.reach * ranks < self.rows * self.cols

    def words(self, count: int, ranks: int) -> list[tuple[int, ...]]:
        """The shapes of the tensors that the ranks exchange for this many weights: the statistics, and the ends of all
        fragments or all elements. They are the same on all ranks, whatever kernels these have."""
        stats: list[tuple[int, ...]] = [(count, *grid.shape) for grid in self.stats if self.in_fragments]
        if ranks == 1:
            return stats
        if not self.in_parts(ranks):
            return [*stats, (count, self.rows * self.cols)]
        return [*stats, (count, ranks, HEAD + 2 * self.reach)] if self.reach else stats


@dataclass(frozen=True, eq=False)
class Item:
    """One weight, and the fragment of its master that this rank owns."""

    index: int
    weight: QuantizedTensor
    values: Tensor
    """The elements ``span`` of the flattened master in fp32."""
    span: Span
    state: Mapping[str, Tensor] | None
    seed: Tensor | None
    fault: Exception | None = None
    """Why this rank refuses its part of the master. It is raised once the other ranks have the news."""

    @cached_property
    def kind(self) -> Kind:
        t = self.weight
        rows, cols = t.matrix_shape
        return Kind(t.quantizer, t.row is not None, t.col is not None, rows, cols, t.dtype, self.state is not None)
