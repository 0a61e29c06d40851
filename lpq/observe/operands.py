"""The operands of a tensor that an observer is told of: some of its rows, encoded as they are in the whole tensor.

Encoding needs the tensor, its state and the bits of this pass. All that follows is a function of the buffers that
encoding leaves, which a GPU can replay for the next tensor of the same kind (``lpq/observe/replays.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.formats.declarations import TURN
from lpq.formats.format import Direction, Quantizer, Storage
from lpq.operations.cut import why_cut
from lpq.operations.decoding import decode
from lpq.operations.inputs import as_matrix
from lpq.operations.part_encoders import of_rows
from lpq.operations.quantizing import quantized
from lpq.operations.sides import declared, draws, shared
from lpq.operations.states import recall
from lpq.tensor import QuantizedTensor
from lpq.tensor.observed import Observed

ALIGNED = 128
"""Rows are taken in multiples of this, as most formats have blocks of no more."""


class Side(NamedTuple):
    """The description of an operand."""

    direction: Direction
    quantizer: Quantizer
    """The quantizer of this side."""
    stats: tuple[str, ...] | None
    """The names of its statistics; None where it is made of the other operand."""
    is_both: bool
    """Whether this row operand is the column operand, too: it holds the same values."""


class SomeRows(NamedTuple):
    """Some rows of a tensor, and the buffers of their operands."""

    sides: tuple[Side, ...]
    tensors: list[Tensor]
    """The rows; then the buffers of each side. Unless it is made of the other operand, the buffers that it would have
    for twice the rows, with the same statistics, and these statistics follow."""


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

    def as_column(self) -> EncodedRows:
        """Return the column operand that has the values of this row operand."""
        doubled = None if self.doubled is None else self.doubled.t()
        stats = {name: value.t() if value.dim() == 2 else value for name, value in (self.stats or {}).items()}
        return EncodedRows("col", self.quantizer, self.x.t(), self.decoded.t(), doubled, stats)


def operands(tensor: Observed, most: int, turn: int) -> list[EncodedRows]:
    """Return the operands of about ``most`` rows; see ``some_rows``."""
    rows = some_rows(tensor, most, turn)
    return [] if rows is None else of_buffers(*rows)


def some_rows(tensor: Observed, most: int, turn: int) -> SomeRows | None:
    """Encode about ``most`` rows of a tensor, other ones in each ``turn``, with the statistics and the random bits of
    the whole. Left out are operands that are the matrix itself, and a tensor that came encoded: nobody has the values
    that were rounded. None: no operand is left. All ranks that share the tensor call this."""
    quantizer, derived = tensor.quantizer, tensor.quantizer.col_source == "row"
    row = quantizer.side("row") if tensor.row or derived else None
    col = quantizer.side("col") if tensor.col else None
    either = [side for side in (row, col) if side is not None]
    if isinstance(tensor.given, QuantizedTensor) or not tensor.given.numel() or all(side.plain for side in either):
        return None
    matrix, own = as_matrix(tensor.given), None if derived else col
    specs, values = declared(row, own), tensor.known()
    start, count = (0, len(matrix)) if derived else _bounds(tensor, len(matrix), row, own, most, turn)
    cut = count < len(matrix)
    stats = [value if not cut else of_rows(one, value, start, count) for one, value in zip(specs, values, strict=True)]
    rows, (down, across) = matrix[start : start + count], tensor.place
    twice = rows.float().mul(2.0) if rows.dtype == torch.float16 else rows.mul(2.0)  # fp16 ends at 65504
    seed = tensor.seed
    if seed is None and draws(row, col):  # of a recipe that is not the layer's: no bits may be taken from the run
        seed = torch.zeros((), dtype=torch.int64, device=rows.device)
    encodings = [quantized(x, stats or None, row, own, seed, down + start, across=across) for x in (rows, twice)]
    sides, tensors, is_both = list[Side](), [rows], shared(row, own)
    for direction, side, at in _directions(row, None if is_both else own):
        if side.plain or not getattr(tensor, direction):
            continue
        sides.append(Side(direction, side, tuple(stat.name for stat, _ in specs[at]), is_both))
        for of_row, of_col, _ in encodings:
            tensors += of_row if direction == "row" else of_col
        tensors += stats[at]
    if derived and col is not None and not (tensor.is_part and any(stat.block[1] is None for stat in col.stats)):
        assert row is not None
        source = decode(row.storage.wrap(encodings[0][0], row, (count, matrix.shape[1]), rows.dtype), torch.float32)
        of_state = None if tensor.state is None else recall(quantizer, None, col, tensor.state)
        _, of_col, _ = quantized(source, of_state, None, col, seed, down, across=across)
        if not col.plain:
            sides.append(Side("col", col, None, is_both=False))
            tensors += of_col
    return SomeRows(tuple(sides), tensors)


def of_buffers(sides: Sequence[Side], tensors: Sequence[Tensor]) -> list[EncodedRows]:
    """Return the operands that these buffers are, as ``SomeRows`` has them."""
    rest = iter(tensors)
    rows, found = next(rest), list[EncodedRows]()
    for side in sides:
        found.append(_of_side(side, rows if side.direction == "row" else rows.t(), rest))
        if side.is_both:
            found.append(found[-1].as_column())
    return found


def _of_side(side: Side, matrix: Tensor, rest: Iterator[Tensor]) -> EncodedRows:
    quantizer, names = side.quantizer, side.stats

    def storage() -> Storage:
        buffers = [*islice(rest, len(quantizer.layout))]
        return quantizer.storage.wrap(buffers, quantizer, (matrix.shape[0], matrix.shape[1]), matrix.dtype)

    once = storage()
    x = _as_stored(matrix, once)
    if names is None:
        return EncodedRows(side.direction, quantizer, x, _stored(once), None, None)
    twice = storage()
    stats = dict(zip(names, islice(rest, len(names)), strict=True))
    return EncodedRows(side.direction, quantizer, x, _stored(once), _stored(twice), stats)


def _bounds(
    tensor: Observed, rows: int, row: Quantizer | None, col: Quantizer | None, most: int, turn: int
) -> tuple[int, int]:
    """Return where the rows begin, and how many they are: all of them where an operand cannot be cut there. Random bits
    are of rows that lie beside each other."""
    count = max(most // ALIGNED, 1) * ALIGNED
    sides = [(side, dim) for side, dim in ((row, 0), (col, 1)) if side is not None]
    if any(side.stochastic for side, _ in sides):
        rows = min(rows, tensor.together)
    if rows <= count or why_cut(sides, count, "rows") is not None:
        return 0, rows
    return turn % (rows // count) * count, count


def _directions(row: Quantizer | None, col: Quantizer | None) -> list[tuple[Direction, Quantizer, slice]]:
    """The operands, each with the place of its statistics."""
    of_row = 0 if row is None else len(row.stats)
    directions: list[tuple[Direction, Quantizer, slice]] = []
    if row is not None:
        directions.append(("row", row, slice(0, of_row)))
    if col is not None:
        directions.append(("col", col, slice(of_row, of_row + len(col.stats))))
    return directions


def _as_stored(x: Tensor, operand: Storage) -> Tensor:
    """The matrix in the basis in which the operand is stored."""
    basis = operand.quantizer.basis
    if basis is None:
        return x.float()
    return basis.apply(x, getattr(operand, TURN) if basis.drawn else None)


def _stored(operand: Storage) -> Tensor:
    """The values that are stored, in the basis of the format."""
    return decode(operand, torch.float32) if operand.quantizer.basis is None else operand.decode_rotated()
