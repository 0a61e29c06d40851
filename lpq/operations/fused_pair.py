"""Both operands of a tensor from one read, each in a format of its own.

A ``KernelSpec`` for the operation ``tile`` describes how a format makes one of its operands tile by tile: by which
struct of which header (``csrc/common/side.cuh``), and from which parameters. Any two formats that have one are then
written by one kernel, ``csrc/common/pair.cu``, which is compiled for the two, and no pair of formats has code of its
own. A format need not have one: its operands are then made one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.format import Direction, Quantizer
from lpq.kernels.fresh import Allocate, allocator
from lpq.kernels.nvrtc_cache import csrc
from lpq.kernels.sections import Find, SectionedMatrix
from lpq.kernels.table import NO_KERNEL, bound_once, optional
from lpq.kernels.tiles import (
    INPUTS,
    SQUARE,
    ZERO,
    Shape,
    bind_amax_parts,
    covering,
    divides,
    tile_kernels,
    tiles,
)
from lpq.operations.binding import Encode, Encoded, Encoding, cached_by_shape
from lpq.operations.exact_form import Form
from lpq.operations.sides import shared

ALIGNED = 16
"""Rows and columns of a matrix are multiples of this where exact forms of it are made."""


class Job(NamedTuple):
    """One wanted operand of matrices of one shape, which are contiguous and not empty."""

    shape: tuple[int, int]
    """The shape of the operand: the matrix's, or its transpose's."""
    dtype: torch.dtype
    """The dtype of the matrix."""
    device: torch.device
    offset: int = 0
    """The first row of the matrix in the whole tensor."""
    measure: bool = False
    """Whether the statistics are returned."""
    dispatched: bool = False
    """As ``Encoding.dispatched``."""

    @property
    def empty(self) -> Allocate:
        """The function that allocates the buffers."""
        return allocator(self.device, dispatched=self.dispatched)


class Made(NamedTuple):
    """The tensors that a kernel is about to write for one operand, and its parameters."""

    buffers: Sequence[Tensor]
    """The buffers of the operand, in the order of its layout."""
    measured: Sequence[Tensor]
    """The statistics, if they are wanted."""
    parameters: Sequence[float]
    """The fields of the struct's ``Parameters``, pointers as integers. Others hold the memory that they point to."""
    zero: int = 0
    """The address of a number in fp32 that must be zero before; 0: there is none."""


Make = Callable[[Sequence[Tensor | None], Tensor | None, Tensor | None, Sequence[Tensor] | None], Made]
"""``make(stats, found, seed, into)``, on the current device. ``stats``: the statistics of the operand that are given,
contiguous. ``found``: statistics that were measured before, if they were needed. ``into``: the buffers, where they
exist already: buffers of sections, each of which has an amax and a seed; for an operand that is decoded, its matrix
alone."""
Look = Callable[[int], tuple[Tensor, Tensor | None]]
"""``look(x)``, of an address: the statistics for one operand and, if wanted, the amax of the matrix."""
Finder = Callable[[SectionedMatrix, "Direction", bool, bool], tuple[Find, bool]]
"""``finder(sections, direction, amax, both)`` binds the search for statistics that an operand needs before it is
encoded, and returns whether that also serves the other operand: by the ``amax`` of sections or, if ``both`` have the
same finder, by all that it finds."""


class Struct(NamedTuple):
    """A struct that a kernel is compiled for."""

    header: Path
    """The header that has it."""
    name: str
    """Its name, with template arguments."""
    parameters: str = "P"
    """A letter for each field of its ``Parameters``, as for ``CudaKernel``."""


NOTHING = Struct(csrc() / "common/nothing.cuh", "Nothing")
"""Takes the place of an operand that is not wanted. Its parameters are a pointer that nobody reads."""


def pair_macros(row: Struct, col: Struct) -> tuple[str, ...]:
    """The macros by which ``pair.cu`` is compiled for two operands."""
    sides = ("ROW", row), ("COL", col)
    return tuple(text for side, s in sides for text in (f"LPQ_{side}={s.name}", f'LPQ_{side}_HEADER="{s.header}"'))


@dataclass(frozen=True)
class TileSide:
    """How one operand of a format is made tile by tile."""

    header: Path
    """The header that has the struct."""
    struct: str
    """The struct, with its template arguments."""
    parameters: str
    """A letter for each field of its ``Parameters``, as for ``CudaKernel``."""
    bind: Callable[[Job], Make]
    """Binds the allocation of the struct's output."""
    amax: bool = False
    """Whether it needs values whose largest is the amax of the matrix."""
    find: Callable[[Encoding, bool], Look] | None = None
    """Binds the search for statistics that the struct needs before it encodes; it may have to find the amax, too."""
    lines: str = ""
    """The side, a struct of the same header, that finds the amaxes of the operand's lines, which ``find`` finds in a
    matrix, in what a source computes. Its ``Parameters`` are one pointer, ``data``, to a zero in fp32 for each line."""
    by_product: bool = False
    """Whether the struct measures on the way, so that given statistics need no read of their own."""
    shape: Shape = SQUARE
    """The shape of its tiles; the smaller one of two sides is taken."""
    least: Shape = SQUARE
    """The smallest tiles that it works in: no block of the operand is longer."""
    turns: int = 1
    """How many tiles a block of threads should take in turn; of two sides the smaller number."""
    aligned: int = 1
    """Only shards whose first row is a multiple of this are encoded so."""
    finder: Finder | None = None
    """The search for statistics of sections that it needs; see ``Finder``. None: it needs their amaxes, or nothing."""
    decoded: tuple[str, Shape] | None = None
    """The struct that makes, in sections, the decoded operand in bf16, in the basis in which it is stored; and the
    shape of its tiles."""
    exact: Form | None = None
    """For ``exact_tile``: the buffers are the matrix of such an exact form and, if it has one, the factor. Rows and
    columns are multiples of ``ALIGNED`` then."""

    @property
    def compiled(self) -> Struct:
        """The struct, as kernels are compiled for it."""
        return Struct(self.header, self.struct, self.parameters)

    def needs(self, given: bool, measure: bool) -> bool:
        """Whether something must be measured first. ``given``: whether the operand's first statistic is given."""
        return (self.amax or self.find is not None) and (not given or (measure and not self.by_product))


class BoundSide(NamedTuple):
    """One operand of matrices of one shape, bound."""

    side: TileSide
    make: Make
    stats: slice
    """Its statistics, among the statistics of both operands; ``none``: a None for each."""
    none: tuple[None, ...]
    needs: bool
    """Whether something must be measured first."""


def bind_sides(e: Encoding, row: TileSide | None, col: TileSide | None) -> tuple[BoundSide | None, BoundSide | None]:
    """Bind the allocation of both operands, None of one that is not wanted. A column operand that follows from the row
    operand has its statistics and measures none."""
    (rows, cols), count = e.shape, len(e.row.stats) if e.row is not None else 0
    follows = shared(e.row, e.col)
    out: list[BoundSide | None] = []
    for side, quantizer, shape, second in ((row, e.row, (rows, cols), False), (col, e.col, (cols, rows), True)):
        if side is None:
            out.append(None)
            continue
        measure, first = e.measure and not (follows and second), count if second and not follows else 0
        none, flag = (None,) * len(quantizer.stats), bool(e.given) and e.given[first]
        make = side.bind(Job(shape, e.held, e.device, e.offset, measure, e.dispatched))
        out.append(BoundSide(side, make, slice(first, first + len(none)), none, side.needs(flag, measure)))
    return out[0], out[1]


def side_of(quantizer: Quantizer, direction: Direction, device: torch.device, op: str = "tile") -> TileSide | str:
    """Describe how an operand is made tile by tile, or why it is not."""
    impl = optional(op, quantizer, device)
    side: TileSide | str | None = impl if isinstance(impl, str) else impl(quantizer, direction)
    if isinstance(side, TileSide):
        return side
    return f"{quantizer} has no {direction} operand tile by tile: {side or NO_KERNEL}"


def why_not(row: Quantizer, col: Quantizer) -> str | None:
    """Why one read does not make both operands: one is not made tile by tile, or follows from the other."""
    if shared(row, col):
        return "the column operand follows from the row operand"
    device = torch.device("cuda", torch.cuda.current_device())
    sides = side_of(row, "row", device), side_of(col, "col", device)
    return next((side for side in sides if isinstance(side, str)), None)


def bind(e: Encoding) -> Encode | None:
    """Bind one read that makes both operands of matrices of one shape; None where there is none."""
    assert e.row is not None
    assert e.col is not None
    pair = pair_of(e.row.text, e.col.text, e.exact, e.device)
    return pair.bind(e) if pair is not None else None


quantize = cached_by_shape(bind)


def exact_forms(
    row: Quantizer, col: Quantizer, shape: tuple[int, int], exact: tuple[bool, bool], device: torch.device
) -> tuple[Form | None, Form | None] | None:
    """The form in which each operand of a matrix is made, None of one that is encoded. None: they cannot be made so."""
    rows, cols = shape
    if rows % ALIGNED or cols % ALIGNED or rows * cols == 0:
        return None
    if not ((row.whole(cols) or not exact[0]) and (col.whole(rows) or not exact[1])):
        return None
    pair = pair_of(row.text, col.text, exact, device)
    return None if pair is None else (pair.row.exact, pair.col.exact)


class Pair(NamedTuple):
    """Two sides, which one kernel is compiled for."""

    row: TileSide
    col: TileSide

    def bind(self, e: Encoding) -> Encode | None:
        """Bind one read of the tensor, after the reads that find its amaxes, if they are needed; None where the
        reference has to encode."""
        row, col = self
        if 0 in e.shape or e.offset % row.aligned or e.offset % col.aligned:
            return None
        (rows, cols), index, shape = e.shape, e.device.index or 0, min(row.shape, col.shape)
        first, second = bind_sides(e, row, col)
        assert first is not None
        assert second is not None
        amax_sides = [i for i, bound in enumerate((first, second)) if bound.needs and bound.side.amax]
        finds = [
            (i, bound.side.find(e, bool(amax_sides)))
            for i, bound in enumerate((first, second))
            if bound.needs and bound.side.find is not None
        ]
        parts, measure_amax = bind_amax_parts(e.held, e.dtype, rows * cols, e.device) if amax_sides else ((), None)
        empty = allocator(e.device, dispatched=e.dispatched)
        blocks = tiles(rows, cols, shape)
        whole = e.aligned and divides(rows, cols, shape)
        stats = ["LPQ_STATS"] if e.measure or True in e.given else []
        macros = INPUTS[e.dtype], *pair_macros(row.compiled, col.compiled), *stats, *covering(shape, whole)
        kernel = tile_kernels("common/pair.cu", "pair", f"P({row.parameters})({col.parameters})I")[shape]
        launch = kernel.bind(index, macros, -(-blocks // min(row.turns, col.turns)))
        (_, make, one, no_stats, _), (_, make_beside, other, none_beside, _) = first, second
        tail, zero = (blocks, rows, cols), ZERO.bind(index, (), 1)

        def encode(x: Tensor, at: int, stats: Sequence[Tensor | None], seed: Tensor | None) -> Encoded:
            statistics: list[Tensor | None] = [None, None]
            amax = None
            for i, find in finds:
                statistics[i], amax = find(at)
            if measure_amax is not None and amax is None:
                amax = empty(*parts)
                measure_amax(at, amax.data_ptr())
            for i in amax_sides:
                statistics[i] = amax
            of_row = make(stats[one] or no_stats, statistics[0], seed, None)
            of_col = make_beside(stats[other] or none_beside, statistics[1], seed, None)
            if of_row.zero or of_col.zero:
                zero(of_row.zero or of_col.zero, 1, of_col.zero or of_row.zero, 1)
            launch(at, *of_row.parameters, *of_col.parameters, *tail)
            return of_row.buffers, of_col.buffers, (*of_row.measured, *of_col.measured)

        return encode


@bound_once
def pair_of(row: str, col: str, exact: tuple[bool, bool], device: torch.device) -> Pair | None:
    """The sides that make both operands, each encoded or in its ``exact`` form; None where one is not made so."""
    first, second = (
        side_of(registry.quantizer(text), direction, device, "exact_tile" if is_exact else "tile")
        for text, direction, is_exact in zip((row, col), get_args(Direction), exact, strict=True)
    )
    return None if isinstance(first, str) or isinstance(second, str) else Pair(first, second)
