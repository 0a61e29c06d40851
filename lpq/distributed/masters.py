"""Sharded master weights: cast to quantized weights that every rank holds whole.

As in ZeRO: each rank owns a part of each flattened fp32 master, anywhere, of any length. A rank takes zeros for the
elements of the others. Once the codes are gathered, every buffer has, bit for bit, the bytes of the encoded whole
master.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lpq.distributed.master_parts import MasterPart, States, agreed_parts
from lpq.formats import Quantizer, Storage
from lpq.operations.derived_operands import derive_col, derives_col
from lpq.operations.measuring import measure
from lpq.operations.operands import encode_operands
from lpq.operations.quantizing import quantize
from lpq.operations.reduce_statistics import reduce_max
from lpq.operations.states import recall, remember
from lpq.tensor import QuantizedTensor
from lpq.tensor.encode_writes import overwrite

__all__ = ["Piece", "Pieces", "cast_master_weights", "finish_gather"]
NOTHING = torch.iinfo(torch.int32).min
"""The bits for the elements of other ranks: no bits are less as integers, so a MAX leaves the owner's bits."""


@dataclass(frozen=True, eq=False)
class Piece:
    """The codes of an operand that have to be gathered, and the part that this rank has written. The parts of all ranks
    make up the buffer."""

    weight: int
    """The place of its weight in the list that was cast."""
    name: str
    """The operand and the buffer, such as ``row.data``."""
    buffer: Tensor
    """One-dimensional, in the order of the flattened weight, with one code for each element."""
    start: int
    """The part of this rank is ``buffer[start:stop]``."""
    stop: int

    @property
    def own(self) -> Tensor:
        """The part of the buffer that this rank has to send."""
        return self.buffer[self.start : self.stop]

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The places in ``buffer`` that a rank sends which owns elements ``[start, stop)`` of the flattened weight."""
        return start, stop


class Pieces(list[Piece]):
    """The pieces to gather after a cast: of the same buffers on all ranks, in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.unfinished: dict[int, tuple[QuantizedTensor, list[tuple[Tensor, Tensor]]]] = {}
        """The weights whose codes are to be gathered, by their places in the list that was cast; and their codes, each
        with the piece that is gathered in its place."""


def cast_master_weights(
    weights: Sequence[QuantizedTensor],
    masters: Sequence[Tensor | None],
    offsets: Sequence[int],
    group: ProcessGroup | None,
    *,
    states: States | None = None,
    seed: Tensor | int | None = None,
) -> Pieces:
    """Write this rank's parts of the masters into the quantized weights.

    The ranks of ``group`` together own each element of a weight once. Afterwards each rank has all scales, and the
    codes of its own elements. Gather the returned pieces: fill each ``piece.buffer`` from the ``piece.own`` of all
    ranks (``piece.span`` gives the place of a rank's part), and call ``finish_gather``.

    Args:
        weights: The quantized weights, the same on every rank and in the same order.
        masters: For each weight the elements of the flattened master that this rank owns, in fp32 and 1-D; empty or
            None if it owns nothing of it.
        offsets: For each weight the place of the first of these elements.
        group: The ranks that own the masters; None: this process owns all.
        states: For each weight its state of delayed scaling, which is updated, or None.
        seed: The seed of stochastic rounding, the same on all ranks: weight ``i`` rounds as with ``seed + i``.
    """
    parts, pieces = agreed_parts(weights, masters, offsets, group, states, seed), Pieces()
    device = parts[0].weight.device if parts else torch.device("cpu")
    many = group if group is not None and group.size() > 1 else None
    apart: list[MasterPart] = []
    whole: list[MasterPart] = []
    for part in parts:
        (apart if many is not None and part.weight.numel() and _codes_are_apart(part) else whole).append(part)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        elements: Sequence[Tensor] = [part.values for part in whole]
        stats = [measure(part.matrix(), *part.sides) for part in apart]
        if many is not None:
            elements = _exchanged(whole, many)
            reduced = iter(reduce_max([stat for own_stats in stats for stat in own_stats], many))
            stats = [[next(reduced) for _ in own_stats] for own_stats in stats]
        for part, values in zip(whole, elements, strict=True):
            _encode_whole(part, values)
        for part, own_stats in zip(apart, stats, strict=True):
            _encode_own(part, own_stats)
            _add(pieces, part)
    return pieces


@torch.no_grad()
def finish_gather(pieces: Pieces, only: Collection[int] | None = None) -> None:
    """Write the operands that follow from the gathered bytes.

    Args:
        pieces: The pieces that ``cast_master_weights`` returned, gathered.
        only: The places of the weights in the list of ``cast_master_weights`` that are finished; None: all.
    """
    for index, (weight, code_pairs) in pieces.unfinished.items():
        if only is None or index in only:
            for codes, whole in code_pairs:
                if codes.data_ptr() != whole.data_ptr():
                    codes.copy_(whole)
            col = None
            if weight.row is not None and weight.col is not None and derives_col(weight.quantizer):
                col = derive_col(weight.quantizer, weight.row)
            _write(weight, None, col)


def _add(pieces: Pieces, part: MasterPart) -> None:
    """Add the codes of a weight, which this rank has written as far as it owns the elements."""
    weight, code_pairs = part.weight, []
    for direction, operand in weight.operands:
        if direction == "col" and weight.row is not None and derives_col(weight.quantizer):
            continue
        for buffer, codes in zip(operand.quantizer.layout, operand.tensors(), strict=True):
            if not buffer.from_stats:
                codes = codes if direction == "row" else codes.t()
                flat = codes.reshape(-1)
                pieces.append(Piece(part.index, f"{direction}.{buffer.name}", flat, *part.span))
                code_pairs.append((codes, flat.view(codes.shape)))
    pieces.unfinished[part.index] = weight, code_pairs


def beside_zeros(side: Quantizer) -> bool:
    """Whether elements have, with the statistics of the whole, the codes that they have in the whole where zeros stand
    for others that are not in their block: whether the format declares it."""
    mixed = side.uncut or side.rotation is not None or any(s.reduce != "max" or s.round > 1 for s in side.stats)
    return side.plain or (not mixed and any(buffer.from_stats for buffer in side.layout))


def _codes_are_apart(part: MasterPart) -> bool:
    """Whether each element has codes of its own, which follow from it and the statistics."""
    codes = [b for side in part.sides if side is not None for b in side.layout if not b.from_stats]
    return (
        part.weight.quantizer.col_source == "original"
        and all(side is None or beside_zeros(side) for side in part.sides)
        and all(b.block == (1, 1) and b.pad == 1 and b.values is None for b in codes)
    )


def _exchanged(parts: Sequence[MasterPart], group: ProcessGroup) -> Sequence[Tensor]:
    """All elements of these masters, from all ranks."""
    if not parts:
        return []
    sizes = [part.weight.numel() for part in parts]
    bits = torch.full((sum(sizes),), NOTHING, dtype=torch.int32, device=parts[0].weight.device)
    for part, own in zip(parts, torch.split(bits, sizes), strict=True):
        own[slice(*part.span)] = part.values.view(torch.int32)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return torch.split(bits.view(torch.float32), sizes)


def _encode_whole(part: MasterPart, values: Tensor) -> None:
    """Write the whole weight; this rank has all its elements."""
    weight, state = part.weight, part.state
    row, col = (side is not None for side in part.sides)
    x = values.view(weight.matrix_shape)
    operands = encode_operands(weight.quantizer, x, row=row, col=col, state=state, seed=part.seed)
    if state is not None:
        remember(weight.quantizer, state, operands.measured, row=row, col=col)
    _write(weight, operands.row, operands.col)


def _encode_own(part: MasterPart, stats: list[Tensor]) -> None:
    """Write all that follows from the statistics of the whole weight, and the codes of the elements that are here."""
    weight, state, (row, col) = part.weight, part.state, part.sides
    stats_used: list[Tensor] = stats
    if state is not None:
        own_stats = recall(weight.quantizer, row, col, state)
        stats_used = [stat if own is None else own for own, stat in zip(own_stats, stats, strict=True)]
    new_row, new_col, _ = quantize(part.matrix(), stats_used, row, col, part.seed)
    if state is not None:
        remember(weight.quantizer, state, stats, row=row is not None, col=col is not None)
    _write(weight, new_row, new_col)


def _write(weight: QuantizedTensor, row: Storage | None, col: Storage | None) -> None:
    """Write these operands to a weight, and have autograd count the write."""
    overwrite(weight, row, col)
    torch.autograd.graph.increment_version(weight)
