"""The operands of a tensor that an observer is told of: some of its rows, encoded as they are in the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from lpq.operations.sides import declared, shared
from lpq.operations.states import recall
from lpq.tensor import QuantizedTensor
from lpq.tensor.observed import Observed

ALIGNED = 128
"""Rows are taken in multiples of this, as most formats have blocks of no more."""


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


def operands(tensor: Observed, most: int, turn: int) -> list[EncodedRows]:
    """Encode about ``most`` rows of a tensor, other ones in each ``turn``, with the statistics and the random bits of
    the whole. Left out are operands that are the matrix itself, and a tensor that came encoded: nobody has the values
    that were rounded. All ranks that share the tensor call this."""
    quantizer, derived = tensor.quantizer, tensor.quantizer.col_source == "row"
    row = quantizer.side("row") if tensor.row or derived else None
    col = quantizer.side("col") if tensor.col else None
    sides = [side for side in (row, col) if side is not None]
    if isinstance(tensor.given, QuantizedTensor) or not tensor.given.numel() or all(side.plain for side in sides):
        return []
    matrix, own = as_matrix(tensor.given), None if derived else col
    specs, values = declared(row, own), tensor.known()
    start, count = (0, len(matrix)) if derived else _some_rows(tensor, len(matrix), row, own, most, turn)
    cut = count < len(matrix)
    stats = [value if not cut else of_rows(one, value, start, count) for one, value in zip(specs, values, strict=True)]
    rows, (down, across) = matrix[start : start + count], tensor.place
    both = rows, rows.float().mul(2.0)
    once, twice = (_encoded(x, stats, row, own, tensor.seed, down + start, across) for x in both)
    result: list[EncodedRows] = []
    for direction, side, at in _directions(row, own, len(specs)):
        x = _as_stored(rows if direction == "row" else rows.t(), once[direction])
        is_transposed = direction == "col" and shared(row, own)
        by_name = {
            stat.name: value.t() if is_transposed and value.dim() == 2 else value
            for (stat, _), value in zip(specs[at], stats[at], strict=True)
        }
        result.append(EncodedRows(direction, side, x, _stored(once[direction]), _stored(twice[direction]), by_name))
    if derived and col is not None and not (tensor.is_part and any(stat.block[1] is None for stat in col.stats)):
        source = decode(once["row"], torch.float32)
        of_col = None if tensor.state is None else recall(quantizer, None, col, tensor.state)
        second = _encoded(source, of_col, None, col, tensor.seed, down, across)["col"]
        result.append(EncodedRows("col", col, _as_stored(rows.t(), second), _stored(second), None, None))
    return [one for one in result if getattr(tensor, one.direction) and not one.quantizer.plain]


def _some_rows(
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


def _directions(row: Quantizer | None, col: Quantizer | None, stats: int) -> list[tuple[Direction, Quantizer, slice]]:
    """The operands, each with the place of its statistics."""
    of_row = slice(0, len(row.stats) if row is not None else 0)
    directions: list[tuple[Direction, Quantizer, slice]] = []
    if row is not None:
        directions.append(("row", row, of_row))
    if col is not None:
        directions.append(("col", col, of_row if shared(row, col) else slice(of_row.stop, stats)))
    return directions


def _encoded(
    x: Tensor, stats: Sequence[Tensor | None] | None, row: Quantizer | None, col: Quantizer | None,
    seed: Tensor | None, offset: int, across: int,
) -> dict[str, Storage]:  # fmt: skip
    if seed is None:  # of a recipe that is not the layer's: no bits may be taken from the run
        seed = torch.zeros((), dtype=torch.int64, device=x.device)
    encodings = quantized(x, stats or None, row, col, seed, offset, across=across)
    shapes = (x.shape[0], x.shape[1]), (x.shape[1], x.shape[0])
    sides = zip(("row", "col"), (row, col), encodings[:2], shapes, strict=True)
    return {d: q.storage.wrap(buffers, q, shape, x.dtype) for d, q, buffers, shape in sides if q is not None}


def _as_stored(x: Tensor, operand: Storage) -> Tensor:
    """The matrix in the basis in which the operand is stored."""
    basis = operand.quantizer.basis
    if basis is None:
        return x.float()
    return basis.apply(x, getattr(operand, TURN) if basis.drawn else None)


def _stored(operand: Storage) -> Tensor:
    """The values that are stored, in the basis of the format."""
    return decode(operand, torch.float32) if operand.quantizer.basis is None else operand.decode_rotated()
