"""Both operands of a tensor from one read, each in a format of its own.

A format says, by a ``KernelSpec`` for the operation ``tile``, how one operand of its is made tile by tile: which struct
of which header makes it (``csrc/common/side.cuh``), and what that is handed. With every other format that says so it is
then written by one kernel, ``csrc/common/pair.cu``, which is compiled for the two, and no pair of formats has code of
its own. A format need not do this: its operands are then made one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from lpq import registry
from lpq.core.multiplicand import Form, Multiplicand
from lpq.core.operations import quantize_reference, shared
from lpq.core.operators import alone, define, layouts, once_when_traced
from lpq.core.storage import Storage
from lpq.ops import KernelError, choose
from lpq.ops.tiles import (
    INPUTS,
    SQUARE,
    Shape,
    amax_parts,
    covering,
    is_whole,
    tile_kernels,
    tiles,
)

if TYPE_CHECKING:
    from lpq.core.quantizer import Direction, Quantizer


ALIGNED = 16
"""Of a matrix of which exact forms are made, rows and columns are multiples of this."""


class Job(NamedTuple):
    """One operand that is wanted."""

    x: Tensor
    """The matrix, contiguous and not empty."""
    shape: tuple[int, int]
    """Of the operand: that of the matrix, or the other way round."""
    stats: Sequence[Tensor | None]
    """The operand's statistics as far as they are given, contiguous."""
    found: Tensor | None
    """What was measured before, if it was needed."""
    seed: Tensor | None
    offset: int
    measure: bool


class Made(NamedTuple):
    """What a kernel is about to write."""

    buffers: Sequence[Tensor]
    """Those of the operand, in the order of its layout."""
    measured: Sequence[Tensor]
    """The statistics, if they were asked for."""
    parameters: Sequence[float]
    """The fields of the struct's ``Parameters``, pointers as integers. What they point to is held by others."""


@dataclass(frozen=True)
class TileSide:
    """How one operand of a format is made tile by tile."""

    header: Path
    """The header that has the struct."""
    struct: str
    """The struct, with its template arguments."""
    parameters: str
    """A letter for each field of its ``Parameters``, as of ``CudaKernel``."""
    make: Callable[[Job], Made]
    """Allocates what the struct writes."""
    amax: bool = False
    """It needs the amax of the matrix: values (``Job.found``) of which that is the largest."""
    find: Callable[[Tensor, bool], tuple[Tensor, Tensor | None]] | None = None
    """It needs what this finds in the matrix, before the first element is encoded. It may be asked for ``amax`` too."""
    by_product: bool = False
    """Statistics that are given need not be measured before: the struct does that on the way."""
    shape: Shape = SQUARE
    """Of its tiles; of two sides the smaller one is taken."""
    turns: int = 1
    """How many tiles a block of threads should take in turn; of two sides the smaller number."""
    aligned: int = 1
    """Only shards whose first row is a multiple of this are encoded so."""
    exact: Form | None = None
    """For ``exact_tile``: the buffers are the matrix of such an exact form and, if it has one, the factor. Rows and
    columns are multiples of ``ALIGNED`` then."""

    def needs(self, stats: Sequence[Tensor | None], measure: bool) -> bool:
        """Whether something must be measured before."""
        return (self.amax or self.find is not None) and (stats[0] is None or (measure and not self.by_product))


def side_of(quantizer: Quantizer, direction: Direction, device: torch.device, op: str = "tile") -> TileSide | str:
    """How an operand is made tile by tile, or why it is not."""
    try:
        choice = choose(op, (quantizer.text,), device)
    except KernelError as error:
        return str(error)
    side: TileSide | None = choice.impl(quantizer, direction) if choice.impl is not None else None
    if side is None:
        reasons = "; ".join(reason for _, reason in choice.rejected)
        return f"{quantizer} has no {direction} operand tile by tile: {reasons or 'its plugin names none'}"
    return side


def why_not(row: Quantizer, col: Quantizer) -> str | None:
    """Both operands must be made tile by tile, and neither follow from the other."""
    if shared(row, col):
        return "the column operand follows from the row operand"
    device = torch.device("cuda", torch.cuda.current_device())
    sides = side_of(row, "row", device), side_of(col, "col", device)
    return next((side for side in sides if isinstance(side, str)), None)


def quantize(x: Tensor, stats: Sequence[Tensor | None], row: Quantizer, col: Quantizer, *rest: Any) -> list[Tensor]:
    """As the reference."""
    pair = _pair(row.text, col.text, x.get_device())
    assert pair is not None
    return pair.quantize(x, stats, row, col, *rest)


def multiplicands(
    x: Tensor, row: Quantizer, col: Quantizer, seed: Tensor | None, exact: tuple[bool, bool]
) -> tuple[Storage, Storage] | None:
    """Both operands of ``x``, of which one at least is made in its ``exact`` form, without being encoded first; None
    if they cannot be."""
    rows, cols = x.shape
    if rows % ALIGNED or cols % ALIGNED or x.numel() == 0:
        return None
    if seed is None and (row.stochastic or col.stochastic):
        return None
    if alone(x):
        pair = _making(row.text, col.text, *exact, x.device)
        if pair is None:
            return None
        made, beside = pair.made(x.contiguous(), (), row, col, seed, 0, False)
        first, second = made.buffers, beside.buffers
        forms = pair.row.exact, pair.col.exact
    else:
        found = _forms(row.text, col.text, *exact, x.device)
        if found is None:
            return None
        forms = found
        texts = row.text, col.text
        both = torch.ops.lpq.multiplicands(x, *texts, seed, *exact, layouts(*texts))
        at = len(row.layout) if forms[0] is None else 1 + forms[0].factor
        first, second = both[:at], both[at:]
    return (
        _operand(first, forms[0], row, (rows, cols), x.dtype),
        _operand(second, forms[1], col, (cols, rows), x.dtype),
    )


def _operand(
    tensors: Sequence[Tensor], form: Form | None, quantizer: Quantizer, shape: tuple[int, int], dtype: torch.dtype
) -> Storage:
    if form is None:
        return quantizer.storage.wrap(tensors, quantizer, shape, dtype)
    return Multiplicand.over(tensors, form.constant, quantizer, shape, dtype)


def _making(row: str, col: str, exact_row: bool, exact_col: bool, device: torch.device) -> Pair | None:
    """What makes both operands, those that are ``exact`` in that form; None: nothing does."""
    ops = "exact_tile" if exact_row else "tile", "exact_tile" if exact_col else "tile"
    try:
        if any(choose(op, (side,), device).impl is None for op, side in zip(ops, (row, col), strict=True)):
            return None
    except KernelError:  # nothing but kernels is allowed, and these are not there
        return None
    return _pair(row, col, device.index or 0, *ops)


@once_when_traced
def _forms(
    row: str, col: str, exact_row: bool, exact_col: bool, device: torch.device
) -> tuple[Form | None, Form | None] | None:
    """The form in which each operand is made, None of one that is encoded. None: they cannot be made so."""
    pair = _making(row, col, exact_row, exact_col, device)
    return None if pair is None else (pair.row.exact, pair.col.exact)


def _multiplicands(
    x: Tensor, row: str, col: str, seed: Tensor | None, exact_row: bool, exact_col: bool, layouts: str = ""
) -> list[Tensor]:
    pair = _making(row, col, exact_row, exact_col, x.device)
    assert pair is not None
    quantizers = cast("Quantizer", registry.quantizer(row)), cast("Quantizer", registry.quantizer(col))
    first, second = pair.made(x.contiguous(), (), *quantizers, seed, 0, False)
    return [*first.buffers, *second.buffers]


def _multiplicands_fake(
    x: Tensor, row: str, col: str, seed: Tensor | None, exact_row: bool, exact_col: bool, layouts: str = ""
) -> list[Tensor]:
    rows, cols = x.shape
    forms = _forms(row, col, exact_row, exact_col, x.device)
    assert forms is not None
    out: list[Tensor] = []
    for form, text, shape in zip(forms, (row, col), ((rows, cols), (cols, rows)), strict=True):
        if form is None:
            quantizer = cast("Quantizer", registry.quantizer(text))
            out += quantizer.storage.fresh(quantizer, shape, x).tensors()
        else:
            out += [x.new_empty(shape, dtype=torch.bfloat16)]
            out += [x.new_empty((), dtype=torch.float32)] if form.factor else []
    return out


class Pair:
    """Two sides, and the kernel that is compiled for them."""

    def __init__(self, row: TileSide, col: TileSide) -> None:
        self.row, self.col = row, col
        self.shape = min(row.shape, col.shape)
        self.turns = min(row.turns, col.turns)
        arguments = f"P({row.parameters})({col.parameters})I"
        self.kernel = tile_kernels("common/pair.cu", "pair", arguments)[self.shape]
        self.macros = (
            f"LPQ_ROW={row.struct}", f'LPQ_ROW_HEADER="{row.header}"',
            f"LPQ_COL={col.struct}", f'LPQ_COL_HEADER="{col.header}"',
        )  # fmt: skip
        self._compiled_for: dict[tuple[torch.dtype, bool, bool], tuple[str, ...]] = {}

    def compiled_for(self, dtype: torch.dtype, *, stats: bool, whole: bool) -> tuple[str, ...]:
        """The macros for an input, where statistics are given or wanted, and where tiles cover the matrix exactly."""
        key = dtype, stats, whole
        if key not in self._compiled_for:
            switches = ["LPQ_STATS"] if stats else []
            self._compiled_for[key] = (INPUTS[dtype], *self.macros, *switches, *covering(self.shape, whole))
        return self._compiled_for[key]

    def quantize(
        self,
        x: Tensor,
        stats: Sequence[Tensor | None],
        row: Quantizer,
        col: Quantizer,
        seed: Tensor | None,
        offset: int,
        measure: bool,
    ) -> list[Tensor]:
        """As the reference."""
        if x.numel() == 0 or offset % self.row.aligned or offset % self.col.aligned:
            return quantize_reference(x, stats, row, col, seed, offset, measure)
        made, beside = self.made(x.contiguous(), stats, row, col, seed, offset, measure)
        return [*made.buffers, *beside.buffers, *made.measured, *beside.measured]

    def made(
        self,
        x: Tensor,
        stats: Sequence[Tensor | None],
        row: Quantizer,
        col: Quantizer,
        seed: Tensor | None,
        offset: int,
        measure: bool,
    ) -> tuple[Made, Made]:
        """One read of the tensor, after those in which its amaxes are found if they are needed."""
        first, second = self.row, self.col
        rows, cols = x.shape
        known = [None if s is None else s.contiguous() for s in stats] or [None] * (len(row.stats) + len(col.stats))
        given = known[: len(row.stats)], known[len(row.stats) :]
        found = _found(x, (first, second), given, measure)
        whole = is_whole(x, rows, cols, self.shape)
        jobs = [
            Job(x, shape, own, before, seed, offset, measure)
            for shape, own, before in zip(((rows, cols), (cols, rows)), given, found, strict=True)
        ]
        made, beside = first.make(jobs[0]), second.make(jobs[1])
        count = tiles(rows, cols, self.shape)
        self.kernel.launch(
            x.get_device(), self.compiled_for(x.dtype, stats=measure or bool(stats), whole=whole),
            -(-count // self.turns), x.data_ptr(), *made.parameters, *beside.parameters, count, rows, cols,
        )  # fmt: skip
        return made, beside


def _found(
    x: Tensor, sides: tuple[TileSide, TileSide], given: tuple[Sequence[Tensor | None], ...], measure: bool
) -> list[Tensor | None]:
    """What each side needs of the matrix before, all of it from one read if one can give it."""
    need = [side.needs(stats, measure) for side, stats in zip(sides, given, strict=True)]
    found: list[Tensor | None] = [None, None]
    wants_amax = any(side.amax for side, needed in zip(sides, need, strict=True) if needed)
    amax = None
    for i, side in enumerate(sides):
        if need[i] and side.find is not None:
            found[i], beside = side.find(x, wants_amax and amax is None)
            amax = beside if amax is None else amax
    if wants_amax and amax is None:
        amax = amax_parts(x, x.dtype)
    return [amax if side.amax and needed else f for side, needed, f in zip(sides, need, found, strict=True)]


@registry.cached
def _pair(row: str, col: str, index: int, row_op: str = "tile", col_op: str = "tile") -> Pair | None:
    device = torch.device("cuda", index)
    first = side_of(cast("Quantizer", registry.quantizer(row)), "row", device, row_op)
    second = side_of(cast("Quantizer", registry.quantizer(col)), "col", device, col_op)
    return None if isinstance(first, str) or isinstance(second, str) else Pair(first, second)


define(
    "multiplicands(Tensor x, str row, str col, Tensor? seed, bool exact_row, bool exact_col, "
    'str layouts="") -> Tensor[]',
    _multiplicands,
    _multiplicands_fake,
)
