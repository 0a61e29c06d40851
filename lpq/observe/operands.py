"""The operands of a tensor that an observer is told of: some of its rows, encoded as they are in the whole tensor.

Rows, statistics and state are taken from the tensor. All that follows is a function of them, which a GPU can replay for
the next tensor of the same kind (``lpq/observe/replays.py``). Only random bits depend on where the rows are, so rows
that are rounded with them are encoded first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress, islice
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.formats.format import Direction, Quantizer, Storage
from lpq.formats.layout import Stat, bytes_of
from lpq.formats.rotation import TURN
from lpq.operations.cut import why_cut
from lpq.operations.decoding import decode
from lpq.operations.inputs import as_matrix
from lpq.operations.part_encoders import of_rows
from lpq.operations.quantizing import quantized
from lpq.operations.rotated_decoding import decode_rotated
from lpq.operations.sides import declared, draws, shared
from lpq.operations.states import recall
from lpq.registry import cached_few
from lpq.tensor import QuantizedTensor
from lpq.tensor.observed import Observed

ALIGNED = 128
"""Rows are taken in multiples of this, as most formats have blocks of no more."""


class Side(NamedTuple):
    """The description of an operand."""

    direction: Direction
    quantizer: Quantizer
    """The quantizer of this side."""
    is_both: bool = False
    """Whether this row operand is the column operand, too: it holds the same values."""
    is_made: bool = False
    """Whether it is made of the row operand."""


class HowEncoded(NamedTuple):
    """How some rows of a tensor are encoded."""

    sides: tuple[Side, ...]
    """The operands whose values are wanted."""
    row: Quantizer | None
    col: Quantizer | None
    """The operands that are encoded together."""
    recalled: tuple[bool, ...] = ()
    """For each statistic of an operand that is made of the row operand, whether a state has it."""
    draws: bool = False
    """Whether they are rounded with random bits."""


class SomeRows(NamedTuple):
    """Some rows of a tensor, and what encodes them."""

    how: HowEncoded
    tensors: list[Tensor]
    """The arguments of ``buffers``; where random bits are drawn, its results."""


class EncodedRows(NamedTuple):
    """An operand, and the matrix that it encodes, in fp32, in the basis of the format, with the contraction last."""

    direction: Direction
    quantizer: Quantizer
    """The quantizer of this side."""
    x: Tensor
    decoded: Tensor
    doubled: Tensor | None
    """The values that it would have for twice the matrix, with the same statistics; None where it is made of the other
    operand."""
    stats: Mapping[str, Tensor] | None
    nearest: Callable[[], Tensor] | None = None
    """Makes the values that it would have if elements were rounded to the nearest; None where they are."""
    has_same_scales: Tensor | None = None
    """Whether it has the same scales for twice the matrix; None where the format declares that."""

    def as_column(self) -> EncodedRows:
        """Return the column operand that has the values of this row operand, whose sums are its sums, too."""
        return EncodedRows("col", self.quantizer, self.x.t(), self.decoded.t(), None, None)


def operands(tensor: Observed, most: int, turn: int) -> list[EncodedRows]:
    """Return the operands of about ``most`` rows; see ``some_rows``."""
    rows = some_rows(tensor, most, turn)
    return [] if rows is None else encoded(*rows)


def some_rows(tensor: Observed, most: int, turn: int) -> SomeRows | None:
    """Take about ``most`` rows of a tensor, other ones in each ``turn``, with the statistics and the random bits of the
    whole. Left out are operands that are the matrix itself, and a tensor that came encoded: nobody has the values
    that were rounded. None: no operand is left. All ranks that share the tensor call this."""
    if isinstance(tensor.given, QuantizedTensor) or not tensor.given.numel():
        return None
    most = max(most // ALIGNED, 1) * ALIGNED
    described = _described(tensor.quantizer, tensor.row, tensor.col, tensor.is_part, most)
    if described is None:
        return None
    how, specs, made, can_cut = described
    matrix, values, recalled = as_matrix(tensor.given), tensor.known(), list[Tensor | None]()
    start, count = _bounds(tensor, how, most if can_cut else len(matrix), turn)
    if count < len(matrix):
        values = [of_rows(one, value, start, count) for one, value in zip(specs, values, strict=True)]
    if made is not None and tensor.state is not None:
        recalled = recall(tensor.quantizer, None, made, tensor.state)
        how = how._replace(recalled=tuple(one is not None for one in recalled))
    tensors = [matrix[start : start + count], *values, *(one for one in recalled if one is not None)]
    if not how.draws:
        return SomeRows(how, tensors)
    down, across = tensor.place
    # Without a seed the recipe is not the layer's: no bits may be taken from the run.
    seed = torch.zeros((), dtype=torch.int64, device=matrix.device) if tensor.seed is None else tensor.seed
    return SomeRows(how, buffers(how, [*tensors, seed], down + start, across))


class Described(NamedTuple):
    """The operands of a tensor, as its quantizer describes them."""

    how: HowEncoded
    specs: Sequence[tuple[Stat, int]]
    """The statistics of the operands that are encoded together."""
    made: Quantizer | None
    """The operand that is made of the row operand."""
    can_cut: bool
    """Whether they may be looked at in part."""


@cached_few
def _described(quantizer: Quantizer, has_row: bool, has_col: bool, is_part: bool, most: int) -> Described | None:
    derived = quantizer.col_source == "row"
    row = quantizer.side("row") if has_row or derived else None
    col = quantizer.side("col") if has_col else None
    if all(side.plain for side in (row, col) if side is not None):
        return None
    own, made = (None, col) if derived else (col, None)
    both: tuple[tuple[Direction, Quantizer | None, bool], ...] = (
        ("row", row, has_row), ("col", None if shared(row, own) else own, has_col),
    )  # fmt: skip
    sides = [
        Side(direction, side, is_both=shared(row, own))
        for direction, side, has in both
        if side is not None and not side.plain and has
    ]
    # Statistics of whole columns of the operand are not known where the tensor is a part.
    if made is not None and (made.plain or (is_part and any(stat.block[1] is None for stat in made.stats))):
        made = None
    sides += [] if made is None else [Side("col", made, is_made=True)]
    dims = [(side, dim) for side, dim in ((row, 0), (own, 1)) if side is not None]
    can_cut = why_cut(dims, most, "rows") is None
    how = HowEncoded(tuple(sides), row, own, draws=draws(row, col))
    return Described(how, declared(row, own), made, can_cut)


def buffers(how: HowEncoded, tensors: Sequence[Tensor], down: int = 0, across: int = 0) -> list[Tensor]:
    """Encode rows.

    Args:
        how: How they are encoded.
        tensors: The rows; the statistics of the operands that are encoded together; the recalled statistics of the
            operand that is made of the row operand; where random bits are drawn, their seed.
        down: The first row in the whole tensor, by which random bits are drawn.
        across: The first column in the whole tensor.

    Returns:
        The rows; then the buffers of each side. Unless it is made of the row operand, the buffers that it would have
        for twice the rows, with the same statistics, and these statistics follow.
    """
    rows, *stats = tensors
    seed, row, known = stats.pop() if how.draws else None, how.row, len(declared(how.row, how.col))
    of_state, stats = iter(stats[known:]), stats[:known]
    twice = rows.float().mul(2.0) if rows.dtype == torch.float16 else rows.mul(2.0)  # fp16 ends at 65504
    both = [quantized(x, stats or None, row, how.col, seed, down, across=across) for x in (rows, twice)]
    found = [rows]
    for direction, side, _, is_made in how.sides:
        if is_made:
            assert row is not None
            source = row.storage.from_tensors(both[0][0], row, (rows.shape[0], rows.shape[1]), rows.dtype)
            recalled = [next(of_state) if is_there else None for is_there in how.recalled]
            values = decode(source, torch.float32)
            found += quantized(values, recalled or None, None, side, seed, down, across=across)[1]
            continue
        for of_row, of_col, _ in both:
            found += of_row if direction == "row" else of_col
        found += stats[: len(side.stats)] if direction == "row" else stats[known - len(side.stats) :]
    return found


def encoded(how: HowEncoded, tensors: Sequence[Tensor]) -> list[EncodedRows]:
    """Return the operands of some rows, as ``SomeRows`` has them."""
    rest = iter(tensors if how.draws else buffers(how, tensors))
    rows, found = next(rest), list[EncodedRows]()
    for side in how.sides:
        found.append(_of_side(side, rows if side.direction == "row" else rows.t(), rest))
        if side.is_both:
            found.append(found[-1].as_column())
    return found


def _of_side(side: Side, matrix: Tensor, rest: Iterator[Tensor]) -> EncodedRows:
    quantizer = side.quantizer

    def storage() -> Storage:
        return quantizer.storage.from_tensors(
            [*islice(rest, len(quantizer.layout))], quantizer, (matrix.shape[0], matrix.shape[1]), matrix.dtype
        )

    once = storage()
    x = _as_stored(matrix, once)
    if side.is_made:
        return EncodedRows(side.direction, quantizer, x, decode_rotated(once), None, None)
    twice = storage()
    stats = {stat.name: next(rest) for stat in quantizer.stats}
    nearest = partial(_nearest, side, matrix, x, stats) if quantizer.stochastic else None
    same, decoded, doubled = _has_same_scales(once, twice), decode_rotated(once), decode_rotated(twice)
    return EncodedRows(side.direction, quantizer, x, decoded, doubled, stats, nearest, same)


def _has_same_scales(one: Storage, other: Storage) -> Tensor | None:
    """Whether two operands are equal in all buffers that cover more elements than codes do. Buffers that are declared
    to follow from statistics are: they are made of the same ones."""
    areas = [math.prod(math.inf if n is None else n for n in buffer.block) for buffer in one.quantizer.layout]
    undeclared = [not b.from_stats and area > min(areas) for b, area in zip(one.quantizer.layout, areas, strict=True)]
    pairs = [(getattr(one, b.name), getattr(other, b.name)) for b in compress(one.quantizer.layout, undeclared)]
    equal = [(bytes_of(a) == bytes_of(b)).all() for a, b in pairs]
    return torch.stack(equal).all() if equal else None


def _nearest(side: Side, matrix: Tensor, x: Tensor, stats: Mapping[str, Tensor]) -> Tensor:
    """The stored values if no random bits rounded them."""
    quantizer, shape = side.quantizer, (matrix.shape[0], matrix.shape[1])
    alike = quantizer.without_random_bits  # which has kernels
    if alike is None:
        return decode_rotated(quantizer.encode(x, stats).bind(quantizer, shape, x.dtype))
    row, col = (alike, None) if side.direction == "row" else (None, alike)
    of_row, of_col, _ = quantized(matrix if col is None else matrix.t(), [*stats.values()], row, col)
    return decode_rotated(alike.storage.from_tensors([*of_row, *of_col], alike, shape, matrix.dtype))


def _bounds(tensor: Observed, how: HowEncoded, most: int, turn: int) -> tuple[int, int]:
    """Return where the rows begin, and how many they are. Random bits are of rows that lie beside each other."""
    rows = math.prod(tensor.given.shape[:-1])
    if tensor.quantizer.col_source == "row":
        return 0, rows
    if how.draws:
        rows = min(rows, tensor.together)
    return (0, rows) if rows <= most else (turn % (rows // most) * most, most)


def _as_stored(x: Tensor, operand: Storage) -> Tensor:
    """The matrix in the basis in which the operand is stored, row by row as the operand decodes: two matrices in other
    orders are slow to compare."""
    x, basis = x.to(torch.float32, memory_format=torch.contiguous_format).contiguous(), operand.quantizer.basis
    return x if basis is None else basis.apply(x, getattr(operand, TURN) if basis.drawn else None)
