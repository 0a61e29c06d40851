"""Matrices that the ranks of a mesh share out, along their rows or their columns, encoded as the whole matrix is.

A rank encodes its part with the statistics of the whole, which are reduced over the ranks, and with the random bits
that belong to the part's place. So a part has the very bytes that the whole has there, and parts that are gathered are
the whole operand, bit for bit. All of it follows from the declared layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lpq.distributed.shardability import operand_bytes, why_cut
from lpq.formats import Quantizer, Storage
from lpq.formats.joined import cat
from lpq.formats.layout import as_bytes
from lpq.operations.decoding import decode
from lpq.operations.measuring import measure, measure_again
from lpq.operations.operands import recall
from lpq.operations.quantizing import quantize
from lpq.operations.reduce_statistics import Declared, reduce_stats, spans
from lpq.operations.sides import declared, measures_again
from lpq.torch_private.collectives import all_gather, arrived, begin_all_gather

State = Mapping[str, Tensor]
MOST = 1.1
"""The bytes of two operands of a tensor that are sent, at most, as a share of its own in high precision. Somewhat more
than those is still faster: the second operand travels while the first is multiplied, and each rank encodes its own part
alone. One operand by itself has at most the tensor's bytes."""
WORD = 8
"""Bytes of the largest pieces in which buffers are put in their places."""


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


class Part(NamedTuple):
    """A tensor, or this rank's part of one, and how it is encoded."""

    quantizer: Quantizer
    row: bool
    col: bool
    """Whether these operands are wanted."""
    cut: Cut | None = None
    """None: this rank has the whole."""


def why_high(part: Part, rows: int, cols: int, dtype: torch.dtype) -> str | None:
    """Why a tensor ``[rows, cols]`` whose rows the ranks share out is gathered before it is encoded, and not after;
    None if it is gathered encoded. It follows from sizes and layouts: all ranks decide alike."""
    quantizer, row, col, cut = part
    assert cut is not None
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


# ---------------------------------------------------------------------------------------------- the statistics


def measure_parts(
    parts: Sequence[tuple[Part, Tensor, State | None]], seeds: Tensor | None, group: str
) -> tuple[list[list[Tensor]], Tensor | None]:
    """The statistics of whole tensors, of which this rank has these parts, if some span several ranks or are remembered
    in the state of the tensor; else none. Return the seeds of the ranks as common ones, too. It takes a collective, if
    there is anything to reduce, one more for counts, and the same again for a second round.
    """
    return _measured([(part, x, *_first(part), state) for part, x, state in parts], seeds, group)


def _measured(
    parts: Sequence[tuple[Part, Tensor, Quantizer | None, Quantizer | None, State | None]],
    seeds: Tensor | None,
    group: str,
) -> tuple[list[list[Tensor]], Tensor | None]:
    """The same for these operands of each part."""
    found: list[list[Tensor]] = []
    for part, x, row, col, state in parts:
        needed = state is not None or any(map(spans, _along(part, row, col)))
        found.append([*measure(x, row, col)] if needed else [])
    along = [_along(part, row, col) for part, _, row, col, _ in parts]
    seeds = reduce_stats(zip(along, found, strict=True), group, seeds=seeds)
    for (_, x, row, col, _), stats in zip(parts, found, strict=True):
        if stats and measures_again(row, col):
            stats[:] = measure_again(x, row, col, stats)
    reduce_stats(zip(along, found, strict=True), group, 2)
    return found, seeds


def _first(part: Part) -> tuple[Quantizer | None, Quantizer | None]:
    """The quantizers of the operands that are encoded of the tensor itself."""
    quantizer = part.quantizer
    if part.col and quantizer.col_source == "row":
        return quantizer.side("row"), None
    return quantizer.side("row") if part.row else None, quantizer.side("col") if part.col else None


def _along(part: Part, row: Quantizer | None, col: Quantizer | None) -> list[Declared]:
    """The statistics that these operands need, each with the dimension that ranks share out; none if they do not."""
    if part.cut is None:
        return []
    return [(stat, dim if part.cut.dim == 0 else 1 - dim) for stat, dim in declared(row, col)]


# ---------------------------------------------------------------------------------------------- the operands


class Encoded(NamedTuple):
    """The operands of a tensor or of a part, and the statistics that were measured for them, if any."""

    row: Storage | None
    col: Storage | None
    measured: list[Tensor]


def encode_part(
    part: Part, x: Tensor, stats: list[Tensor], state: State | None, seed: Tensor | None, group: str
) -> Encoded:
    """Encode a part with statistics of the whole: those that were measured and reduced, or those of the state."""
    row, col = _first(part)
    first = _encoded(part, x, row, col, stats, state, seed)
    if not part.col or col is not None:
        return first
    assert first.row is not None
    decoded, side = decode(first.row, torch.float32), part.quantizer.side("col")
    (found,), _ = _measured([(part, decoded, None, side, state)], None, group)
    second = _encoded(part, decoded, None, side, found, state, seed)
    assert second.col is not None
    row_operand, measured = (first.row, first.measured) if part.row else (None, [])
    return Encoded(row_operand, second.col.astype(x.dtype), [*measured, *second.measured])


def _encoded(
    part: Part,
    x: Tensor,
    row: Quantizer | None,
    col: Quantizer | None,
    stats: list[Tensor],
    state: State | None,
    seed: Tensor | None,
) -> Encoded:
    use: list[Tensor | None] = [*stats]
    if state is not None:
        known = recall(part.quantizer, row, col, state)
        use = [s if k is None else k for k, s in zip(known, stats, strict=True)]
    random, cut = (row is not None and row.stochastic) or (col is not None and col.stochastic), part.cut
    if cut is None or not random or cut.dim == 1 or cut.stretches == 1:
        at = cut.place(0) if cut is not None and random else 0
        down, across = (at, 0) if cut is None or cut.dim == 0 else (0, at)
        return Encoded(*quantize(x, use or None, row, col, seed, down, across=across)[:2], stats)
    rows, cols = [], []  # each stretch has random bits of its own place
    for i, stretch in enumerate(torch.split(x, cut.size)):
        known = [_of_rows(d, s, i * cut.size, cut.size) for d, s in zip(declared(row, col), use, strict=bool(use))]
        of_row, of_col, _ = quantize(stretch, known or None, row, col, seed, cut.place(i))
        rows += [] if of_row is None else [of_row]
        cols += [] if of_col is None else [of_col]
    return Encoded(cat(rows, 0, agreed=True) if rows else None, cat(cols, 1, agreed=True) if cols else None, stats)


def _of_rows(declared: Declared, stat: Tensor | None, start: int, count: int) -> Tensor | None:
    """A statistic of some rows of a tensor, which cut no block."""
    step, dim = declared[0].block[declared[1]], declared[1]
    return stat if step is None or stat is None else stat.narrow(dim, start // step, count // step)


# ---------------------------------------------------------------------------------------------- gathering


class Gathering(NamedTuple):
    """An operand that is on its way: a GPU does other work until ``finish`` is called."""

    operand: Storage
    dim: int
    cut: Cut
    sent: list[Tensor]

    def finish(self) -> Storage:
        """The operand of the whole."""
        return joined(self.operand, self.dim, self.cut, arrived(self.sent))


def begin_gather(operand: Storage, dim: int, cut: Cut, group: str) -> Gathering:
    """Begin to gather the operand of the whole from those of the parts, in one collective. ``dim``: whether a rank has
    some of its rows (0) or of its columns (1). Buffers that are the same for all parts stay."""
    return Gathering(operand, dim, cut, begin_all_gather(travelling(operand, dim), cut.ranks, group))


def gather_rows(x: Tensor, cut: Cut, group: str) -> Tensor:
    """The whole of a matrix of which the ranks have some rows each."""
    (came,) = all_gather([as_bytes(x)], cut.ranks, group)
    return _in_place(came, 1, cut).view(x.dtype).view(x.shape[0] * cut.ranks, x.shape[1])


def travelling(operand: Storage, dim: int) -> list[Tensor]:
    """The bytes of the buffers that are not the same for all parts."""
    buffers = zip(operand.quantizer.layout, operand.tensors(), strict=True)
    return [as_bytes(tensor) for buffer, tensor in buffers if buffer.unit(dim) is not None]


def joined(operand: Storage, dim: int, cut: Cut, arrived: Sequence[Tensor]) -> Storage:
    """The operand whose buffers arrived, one rank's after the other's."""
    came = iter(arrived)
    rows, cols = operand.shape
    shape = (rows * cut.ranks, cols) if dim == 0 else (rows, cols * cut.ranks)
    tensors = []
    for buffer, tensor in zip(operand.quantizer.layout, operand.tensors(), strict=True):
        if buffer.unit(dim) is None:
            tensors.append(tensor)
            continue
        lines = 1 if dim == 0 else tensor.shape[0]
        placed = _in_place(next(came), lines, cut).view(tensor.dtype)
        whole = list(tensor.shape)
        whole[dim] *= cut.ranks
        tensors.append(placed.view(whole))
    return operand.wrap(tensors, operand.quantizer, shape, operand.dtype)


def _in_place(came: Tensor, lines: int, cut: Cut) -> Tensor:
    """Bytes that arrived rank by rank, in the order of the whole: in so many lines, along which the stretches lie."""
    if not came.numel():
        return came
    size = came.numel() // (cut.ranks * lines * cut.stretches)
    pieces = came.view(torch.int64) if size % WORD == 0 else came
    by_rank = pieces.view(cut.ranks, lines, cut.stretches, -1)
    return by_rank.permute(1, 2, 0, 3).reshape(-1)
