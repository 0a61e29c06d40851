"""Gathers of operands of which each rank has a part. A gather begins when the part is encoded, and finishes where the
operand is multiplied. Meanwhile a GPU encodes another tensor, or makes another product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lpq.formats.layout import as_bytes
from lpq.operations.binding import Encoded, Multiply, Operand
from lpq.operations.cut import Cut
from lpq.operations.derived_operands import bind_derive, derives_col, made_at_use
from lpq.operations.encoder import BindEncoder, Encoder, EncoderSpec, Stats, column_of, operands_of, second_of
from lpq.operations.inputs import as_matrix
from lpq.operations.part_encoders import PartEncoder
from lpq.torch_private import collectives

WORD = 8
"""The bytes of the largest pieces in which buffers are copied to their places."""


class OperandGather:
    """Gathers an operand, in one collective, of parts of one shape. Buffers that are the same for all parts stay."""

    def __init__(self, part: Operand, dim: int, cut: Cut, group: str) -> None:
        """``dim``: whether a rank has some of its rows (0) or of its columns (1)."""
        self.dim, self.cut, self.group = dim, cut, group
        self.moves = [buffer.unit(dim) is not None for buffer in part.quantizer.layout]
        rows, cols = part.shape
        self.whole = part._replace(shape=(rows * cut.ranks, cols) if dim == 0 else (rows, cols * cut.ranks))

    def begin(self, part: Sequence[Tensor]) -> list[Tensor]:
        """Begin to gather; return the tensors from which ``finish`` makes the buffers of the whole."""
        buffers = [as_bytes(tensor) for tensor, moves in zip(part, self.moves, strict=True) if moves]
        return [*part, *collectives.begin_all_gather(buffers, self.cut.ranks, self.group)]

    def finish(self, begun: Sequence[Tensor]) -> list[Tensor]:
        """Wait for the buffers of the whole."""
        count = len(self.moves)
        return self.joined(begun[:count], collectives.arrived(begun[count:]))

    def joined(self, part: Sequence[Tensor], arrivals: Sequence[Tensor]) -> list[Tensor]:
        """The buffers of the whole, from the bytes that arrived, one rank's after the other's."""
        pieces, whole = iter(arrivals), []
        for tensor, moves in zip(part, self.moves, strict=True):
            if not moves:
                whole.append(tensor)
                continue
            shape = list(tensor.shape)
            buffer = in_place(next(pieces), 1 if self.dim == 0 else shape[0], self.cut)
            shape[self.dim] *= self.cut.ranks
            whole.append(buffer.view(tensor.dtype).view(shape))
        return whole


def in_place(arrivals: Tensor, lines: int, cut: Cut) -> Tensor:
    """Put bytes that arrived rank by rank into the order of the whole, which has ``lines`` lines; ranks' chunks lie
    along them."""
    if (lines == 1 and cut.chunks_per_rank == 1) or not arrivals.numel():
        return arrivals
    size = arrivals.numel() // (cut.ranks * lines * cut.chunks_per_rank)
    pieces = arrivals.view(torch.int64) if size % WORD == 0 else arrivals
    by_rank = pieces.view(cut.ranks, lines, cut.chunks_per_rank, -1)
    return by_rank.permute(1, 2, 0, 3).reshape(-1)


def sent_part(spec: EncoderSpec) -> EncoderSpec:
    """How a part is encoded of which the whole operands are gathered: a column operand that follows from the row
    operand is made of it when that has arrived."""
    derived = derives_col(spec.quantizer)
    return spec._replace(row=spec.row or derived, col=spec.col and not derived)


def gathering(
    part: PartEncoder, bind: BindEncoder, spec: EncoderSpec, cut: Cut, group: str, *, at_once: bool, begin: bool = True
) -> PartEncoder:
    """An encoder that gathers the whole operands of what ``part`` encodes, which is bound by ``sent_part``: the row
    operand at once, and the column operand, if not ``at_once`` too, when ``begin`` is called. ``begin``: whether the
    row operand is sent, and not multiplied part by part as it arrives. ``bind``: binds what makes the column operand of
    the whole row operand with the random bits of the pass."""
    quantizer, derived, drawn = spec.quantizer, derives_col(spec.quantizer), made_at_use(spec.quantizer)
    own, source = part.encoder, part.encoder.row if derived else part.encoder.col
    of_row = OperandGather(own.row, 0, cut, group) if own.row is not None else None
    of_col = OperandGather(source, 0 if derived else 1, cut, group) if source is not None and spec.col else None
    whole = spec._replace(shape=(spec.shape[0] * cut.ranks, spec.shape[1]))
    row, col = operands_of(whole)
    derive = column = None
    if of_col is not None and drawn:
        column = column_of(of_col.whole, bind(second_of(whole)), whole)
    elif of_col is not None and derived:
        derive = bind_derive(quantizer, of_col.whole, spec.device)

    follows = at_once and derived and of_col is not None  # the column operand is made of the row operand that arrives

    def encode(x: Tensor, statistics: Stats, seed: Tensor | None) -> Encoded:
        buffers, also, stats = own.encode(x, statistics, seed)
        row: Sequence[Tensor] = ()
        if of_row is not None and (spec.row or at_once):
            row = of_row.begin(buffers) if begin else [*buffers]
        saved: Sequence[Any] = () if of_col is None or follows else buffers if derived else also
        if at_once and of_col is not None and not follows:
            saved = of_col.begin(saved)
        return row, (*saved, seed) if column is not None else saved, stats

    def arrive(row: Sequence[Tensor], saved: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        assert of_row is not None
        whole = of_row.finish(row)
        return whole, (*whole, *saved) if follows else saved

    def begin_column(saved: Sequence[Tensor]) -> Sequence[Tensor]:
        assert of_col is not None
        return [*of_col.begin(saved[:-1]), saved[-1]] if column is not None else of_col.begin(saved)

    def later(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        assert of_col is not None
        tensors, seed = (tensors[:-1], tensors[-1]) if column is not None else (tensors, None)
        whole = tensors if follows else of_col.finish(tensors)
        if column is not None:
            return column(whole, (), seed)[0]
        return whole if derive is None else derive(whole)

    finish, start = (None, None) if of_col is None else (later, None if at_once else begin_column)
    waits = arrive if begin and of_row is not None and (spec.row or at_once) else None
    return part._replace(encoder=Encoder(row, col, encode, finish, derived, start, waits, taken=own.taken))


def bind_gathered_high(bind: BindEncoder, spec: EncoderSpec, cut: Cut, group: str) -> Encoder:
    """Bind an encoder of the whole, which is gathered in high precision before it is encoded."""
    encoder = bind(spec._replace(shape=(spec.shape[0] * cut.ranks, spec.shape[1])))

    def encode(x: Tensor, statistics: Stats, seed: Tensor | None) -> Encoded:
        return encoder.encode(gather_rows(x, cut, group), statistics, seed)

    return encoder._replace(encode=encode)


def gather_rows(x: Tensor, cut: Cut, group: str) -> Tensor:
    """Gather a matrix whose rows are divided over the ranks."""
    part = as_matrix(x)
    (arrivals,) = collectives.arrived(collectives.begin_all_gather([as_bytes(part)], cut.ranks, group))
    return in_place(arrivals, 1, cut).view(part.dtype).view(part.shape[0] * cut.ranks, part.shape[1])


def begin_sum(y: Tensor, cut: Cut | None, group: str) -> Tensor:
    """Begin to sum the ``y`` of all ranks: the whole of it, or this rank's rows if there is a cut."""
    if cut is None:
        return collectives.begin_all_reduce(y, "sum", group)
    if cut.chunks_per_rank > 1:
        y = y.view(cut.chunks_per_rank, cut.ranks, cut.size, y.shape[-1]).transpose(0, 1).reshape(y.shape)
    return collectives.begin_reduce_scatter(y, cut.ranks, group)


def summed(multiply: Multiply, cut: Cut | None, group: str, *, finished: bool) -> Multiply:
    """A product whose sum over the ranks is begun, or ``finished`` as well."""
    if finished:
        return lambda a, b, bias: collectives.finish(begin_sum(multiply(a, b, bias), cut, group))
    return lambda a, b, bias: begin_sum(multiply(a, b, bias), cut, group)
